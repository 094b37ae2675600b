"""Weights: from a checkpoint to one file in the layout that kernels read, and from that file to tensors.

In the file the projections that read the same input are one matrix: `qkv` (query, key and value rows) and `gate_up`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from headwater.engine_core.config import ConfigError
from headwater.engine_core.model_config import ModelConfig
from headwater.engine_core.weights.gguf import GgufFile

Weights = dict[str, torch.Tensor]
WEIGHTS_NAME = "weights.safetensors"
DUMMIES = {"dummy": False, "dummy-uniform": True}
"""Names of random weights, and whether they are uniform."""
UNIFORM_SPREAD = 1e-3
"""As vLLM's loader makes random weights. Numbers so small move fewer wires: a GPU at its limit of power computes them
faster than those of a trained model, so who compares with such figures needs the same."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

_RENAMED = {
    "model.embed_tokens.weight": "embed",
    "model.norm.weight": "final_norm",
    "lm_head.weight": "lm_head",
}
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_LAYER_RENAMED = {
    "input_layernorm.weight": "input_norm",
    "post_attention_layernorm.weight": "post_norm",
    "self_attn.o_proj.weight": "o",
    "self_attn.q_norm.weight": "q_norm",
    "self_attn.k_norm.weight": "k_norm",
    "mlp.down_proj.weight": "down",
}
_FUSED = {
    "self_attn.q_proj.weight": ("qkv", 0),
    "self_attn.k_proj.weight": ("qkv", 1),
    "self_attn.v_proj.weight": ("qkv", 2),
    "self_attn.q_proj.bias": ("qkv_bias", 0),
    "self_attn.k_proj.bias": ("qkv_bias", 1),
    "self_attn.v_proj.bias": ("qkv_bias", 2),
    "mlp.gate_proj.weight": ("gate_up", 0),
    "mlp.up_proj.weight": ("gate_up", 1),
}
_NUM_PARTS = {"qkv": 3, "qkv_bias": 3, "gate_up": 2}
_SHARD = re.compile(r"[^/\\\0]+\.safetensors")
_IGNORED = ("rotary_emb.inv_freq",)


def convert(source: Path, folder: Path, *, dtype: str, progress: Callable[[int, int], None]) -> None:
    """Writes `config.json` and the weights into `folder`; source is a .gguf file or a Hugging Face folder.

    Raises `ConfigError` for an architecture or a tensor that is not served.
    """
    if source.is_dir():
        hf_config = json.loads((source / "config.json").read_text())
        config = ModelConfig.from_hf(hf_config)
        names, tensors = _checkpoint(source)
    else:
        file = GgufFile(source)
        hf_config, names, tensors = file.hf_config(), len(file), file.tensors()
        config = ModelConfig.from_hf(hf_config)
    weights: Weights = {}
    parts: dict[str, dict[int, torch.Tensor]] = {}
    for done, (name, tensor) in enumerate(tensors):
        _place(name, tensor.to(DTYPES[dtype]), weights, parts)
        progress(done, names + 1)
    if parts:
        raise ConfigError("checkpoint", sorted(parts), "every part of a fused projection")
    if config.tie_word_embeddings:
        weights.pop("lm_head", None)
    _check(weights, config)
    (folder / "config.json").write_text(json.dumps(hf_config, indent=2) + "\n")
    save_file(weights, folder / WEIGHTS_NAME)
    progress(names + 1, names + 1)


def load(
    folder: Path,
    config: ModelConfig,
    device: torch.device,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Weights:
    """Tensors of a converted folder. On the CPU they are the file's own pages, mapped read-only and shared by all
    processes that map it; on a GPU they are streamed there. Progress is told in bytes."""
    weights = {}
    done, total = 0, (folder / WEIGHTS_NAME).stat().st_size
    with safe_open(folder / WEIGHTS_NAME, framework="pt", device=str(device)) as file:
        for name in file.keys():  # noqa: SIM118 (not a dict)
            weights[name] = tensor = file.get_tensor(name)
            done += tensor.nbytes
            progress(done, total)
    progress(total, total)
    return _tied(weights, config)


def stored_dtype(folder: Path) -> torch.dtype:
    """Of the weights of a converted folder."""
    with safe_open(folder / WEIGHTS_NAME, framework="pt") as file:
        norm: torch.Tensor = file.get_tensor("final_norm")
    return norm.dtype


def dummy(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, seed: int = 0, *, uniform: bool = False
) -> Weights:
    """Random weights of the right shapes: normal ones, scaled so that activations stay finite, between norms of one;
    or all of them, norms too, uniform within `UNIFORM_SPREAD`."""
    generator = torch.Generator(device).manual_seed(seed)
    weights = {}
    for name, shape in shapes(config).items():
        weights[name] = tensor = torch.empty(shape, dtype=dtype, device=device)
        if uniform:
            tensor.uniform_(-UNIFORM_SPREAD, UNIFORM_SPREAD, generator=generator)
        elif name.endswith("norm"):
            tensor.fill_(1.0)
        else:
            tensor.normal_(0, 0.02, generator=generator)
    return _tied(weights, config)


def shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of the file and its shape."""
    hidden, q_size = config.hidden_size, config.num_heads * config.head_dim
    layer: dict[str, tuple[int, ...]] = {
        "input_norm": (hidden,),
        "qkv": (config.qkv_size, hidden),
        "o": (hidden, q_size),
        "post_norm": (hidden,),
        "gate_up": (2 * config.intermediate_size, hidden),
        "down": (hidden, config.intermediate_size),
    }
    if config.qkv_bias:
        layer["qkv_bias"] = (config.qkv_size,)
    if config.qk_norm:
        layer |= {"q_norm": (config.head_dim,), "k_norm": (config.head_dim,)}
    every: dict[str, tuple[int, ...]] = {"embed": (config.vocab_size, hidden), "final_norm": (hidden,)}
    if not config.tie_word_embeddings:
        every["lm_head"] = (config.vocab_size, hidden)
    for i_layer in range(config.num_layers):
        every |= {f"layers.{i_layer}.{name}": shape for name, shape in layer.items()}
    return every


def _checkpoint(folder: Path) -> tuple[int, Iterator[tuple[str, torch.Tensor]]]:
    """Number of tensors and the tensors of a Hugging Face folder, one file or several."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        files = _listed_files(json.loads(index.read_text()))
    elif (folder / "model.safetensors").is_file():
        files = ["model.safetensors"]
    else:
        raise ConfigError("checkpoint", str(folder), "a folder with model.safetensors or its sharded form")

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for name in files:
            with safe_open(folder / name, framework="pt") as file:
                for key in file.keys():  # noqa: SIM118 (not a dict)
                    yield key, file.get_tensor(key)

    count = 0
    for name in files:
        with safe_open(folder / name, framework="pt") as file:
            count += len(file.keys())
    return count, tensors()


def _listed_files(index: Any) -> list[str]:
    """Names in the index's own folder. Raises `ConfigError` for one that leads out of it."""
    entries = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(entries, dict):
        raise ConfigError("weight_map", entries, "names of files by names of tensors")
    for name in entries.values():
        if not (isinstance(name, str) and _SHARD.fullmatch(name)):
            raise ConfigError("weight_map", name, "names of .safetensors files beside the index")
    return sorted(set(entries.values()))


def _place(name: str, tensor: torch.Tensor, weights: Weights, parts: dict[str, dict[int, torch.Tensor]]) -> None:
    """Puts a checkpoint's tensor where it belongs; parts of a fused matrix wait for each other."""
    if name.endswith(_IGNORED):
        return
    if name in _RENAMED:
        weights[_RENAMED[name]] = tensor.contiguous()
        return
    match = _LAYER.fullmatch(name)
    if match is None or match[2] not in _LAYER_RENAMED | _FUSED:
        raise ConfigError("checkpoint tensor", name, "tensors of a Llama-like decoder")
    prefix, rest = f"layers.{match[1]}.", match[2]
    if rest in _LAYER_RENAMED:
        weights[prefix + _LAYER_RENAMED[rest]] = tensor.contiguous()
        return
    fused, position = _FUSED[rest]
    waiting = parts.setdefault(prefix + fused, {})
    waiting[position] = tensor
    if len(waiting) == _NUM_PARTS[fused]:
        weights[prefix + fused] = torch.cat([waiting[i] for i in range(len(waiting))])
        del parts[prefix + fused]


def _check(weights: Weights, config: ModelConfig) -> None:
    expected = shapes(config)
    if missing := sorted(expected.keys() - weights.keys()):
        raise ConfigError("checkpoint", f"without {missing[:3]}", "every tensor of the architecture")
    for name, shape in expected.items():
        if tuple(weights[name].shape) != shape:
            raise ConfigError(f"checkpoint tensor {name}", tuple(weights[name].shape), str(shape))
    for name in weights.keys() - expected.keys():
        raise ConfigError("checkpoint tensor", name, "tensors that config.json announces")


def _tied(weights: Weights, config: ModelConfig) -> Weights:
    if config.tie_word_embeddings:
        weights["lm_head"] = weights["embed"]
    return weights
