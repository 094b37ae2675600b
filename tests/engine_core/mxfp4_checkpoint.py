"""A small checkpoint of gpt-oss in MXFP4, as it is published, and what transformers makes of it."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from headwater.engine_core.weights.hugging_face import HuggingFaceFolder

PROJECTIONS = ("gate_up_proj", "down_proj")


def write_mxfp4(source: Path, packed: Path, expanded: Path) -> None:
    """Copies a checkpoint of gpt-oss in float32 with random numbers in the place of its experts:
    packed, and expanded by transformers, which has the inputs before the outputs."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors  # noqa: PLC0415 (1.7 s of each worker that collects)

    torch.manual_seed(1)
    config = json.loads((source / "config.json").read_text())
    tensors = dict(HuggingFaceFolder(source).tensors())
    of_blocks: dict[str, torch.Tensor] = {}
    for name in [name for name in tensors if name.endswith(PROJECTIONS)]:
        num_experts, num_inputs, num_outputs = tensors[name].shape
        shape = num_experts, num_outputs, num_inputs // 32
        blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8)
        scales = torch.randint(118, 125, shape, dtype=torch.uint8)
        of_blocks |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        whole = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        tensors[name] = whole.contiguous()
    _write(expanded, tensors, config)
    rest = {name: each for name, each in tensors.items() if not name.endswith(PROJECTIONS)}
    quantization = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    _write(packed, rest | of_blocks, config | {"quantization_config": quantization})


def _write(folder: Path, tensors: dict[str, torch.Tensor], config: dict[str, object]) -> None:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
