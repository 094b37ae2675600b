"""Heads padded with zeros to a power of two, for devices whose kernels read such sizes: zeros
change neither a score nor what is attended."""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from ..config import ConfigError
from .model_config import ModelConfig
from .model_file import Tensors

QKV = "qkv"
QKV_BIAS = "qkv_bias"
OUT = "o"


def pad_heads(tensors: Tensors, model: ModelConfig) -> None:
    """Pads a whole model's projections to and from heads, in place of the dictionary's tensors.
    Raises `ConfigError` for packed ones, whose numbers share scales. Where values have shorter
    heads, tokens are padded in place of weights."""
    if not model.unpadded_head_dim or model.value_dim or model.foreign is not None:
        return
    for i in range(model.num_layers):
        prefix = f"layers.{i}."
        for name in (QKV, OUT):
            if prefix + name not in tensors:
                allowed = "powers of two with weights that are packed, on this platform"
                raise ConfigError("head_dim", model.unpadded_head_dim, allowed)
        for name in (QKV, QKV_BIAS):
            if prefix + name in tensors:
                tensors[prefix + name] = _padded_rows(tensors[prefix + name], model)
        out = tensors[prefix + OUT]
        heads = out.view(len(out), -1, model.unpadded_head_dim)
        tensors[prefix + OUT] = pad(heads, (0, _num_zeros(model))).flatten(1)


def _padded_rows(weight: torch.Tensor, model: ModelConfig) -> torch.Tensor:
    """weight [heads D, …] → [heads D', …]"""
    heads = weight.view(-1, model.unpadded_head_dim, *weight.shape[1:])
    behind = [0, 0] * (heads.dim() - 2)
    return pad(heads, (*behind, 0, _num_zeros(model))).flatten(0, 1)


def _num_zeros(model: ModelConfig) -> int:
    return model.head_dim - model.unpadded_head_dim
