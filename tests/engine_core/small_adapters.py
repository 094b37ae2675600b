"""Small random adapters in PEFT's layout, written without PEFT."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from headwater.engine_core.executor import TakesAdapters
from headwater.engine_core.request import NewRequest
from headwater.engine_core.sampling_params import SamplingParams
from tests.engine_core.small_models import SHAPE, Answer, SmallEngine, receive

HEADS = 32 * SHAPE["num_attention_heads"]
KV_HEADS = 32 * SHAPE["num_key_value_heads"]
HIDDEN = SHAPE["hidden_size"]
INNER = SHAPE["intermediate_size"]
QWEN3_LAYERS = {
    "self_attn.q_proj": (HEADS, HIDDEN),
    "self_attn.k_proj": (KV_HEADS, HIDDEN),
    "self_attn.v_proj": (KV_HEADS, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HEADS),
    "mlp.gate_proj": (INNER, HIDDEN),
    "mlp.up_proj": (INNER, HIDDEN),
    "mlp.down_proj": (HIDDEN, INNER),
}
"""Outputs and inputs of the linear layers of the small qwen3."""
CONFIG: dict[str, Any] = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "r": 4,
    "lora_alpha": 8,
    "target_modules": "all-linear",
}


def tensors_of(
    seed: int,
    rank: int = 4,
    layers: Sequence[str] = tuple(QWEN3_LAYERS),
    sizes: Mapping[str, tuple[int, int]] = QWEN3_LAYERS,
    num_layers: int = SHAPE["num_hidden_layers"],
    spread: float = 0.3,
) -> dict[str, torch.Tensor]:
    """Random factors of layers, by PEFT's names."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for i in range(num_layers):
        for layer in layers:
            num_outputs, num_inputs = sizes[layer]
            prefix = f"base_model.model.model.layers.{i}.{layer}"
            a = torch.randn(rank, num_inputs, generator=generator) * spread
            b = torch.randn(num_outputs, rank, generator=generator) * spread
            tensors[f"{prefix}.lora_A.weight"] = a
            tensors[f"{prefix}.lora_B.weight"] = b
    return tensors


def write_adapter(folder: Path, tensors: Mapping[str, torch.Tensor], **config: Any) -> Path:
    """Writes an adapter's folder; `config`: fields other than those of `CONFIG`."""
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG | config))
    save_file(dict(tensors), folder / "adapter_model.safetensors")
    return folder


def load_adapter(engine: SmallEngine, folder: Path) -> bytes:
    """Has an engine take an adapter. Returns its hash."""
    executor = engine.executor
    assert isinstance(executor, TakesAdapters)
    assert executor.host_adapters is not None
    facts = executor.host_adapters.read(folder)
    engine.engine.add_adapter(facts.digest, facts.num_ranks)
    return facts.digest


def answer(
    engine: SmallEngine,
    prompts: Sequence[Sequence[int]],
    adapters: Sequence[bytes],
    sampling: SamplingParams,
    begun: Sequence[Sequence[int]] = (),
    *,
    forks: bool = False,
) -> list[Answer]:
    """Answers to prompts at once, each with an adapter by its hash or with none. With `forks`, they
    are choices of one request."""
    answers = {}
    for i, (prompt, digest) in enumerate(zip(prompts, adapters, strict=True)):
        answers[i] = Answer([], [], [])
        engine.engine.add(
            NewRequest(
                key=i,
                prompt_ids=list(prompt),
                output_ids=list(begun[i]) if begun else [],
                sampling=sampling,
                choice_index=i if forks else 0,
                forks=forks,
                adapter=digest,
                namespace=digest or b"\0" * 16,
            )
        )
    while engine.engine.has_work():
        if (output := engine.engine.step()) is not None:
            receive(output, answers)
    return [answers[i] for i in range(len(prompts))]
