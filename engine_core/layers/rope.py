"""Rotary embedding: cosines and sines of every position. Source: RoFormer; scaled as in
`rope_scaling`."""

from __future__ import annotations

import torch

from ..weights.model_config import ModelConfig
from ..weights.rope_scaling import scaled


def cos_sin_table(config: ModelConfig, num_positions: int) -> torch.Tensor:
    """float32 [num_positions, head_dim]: cosines in the first half of a row, sines in the
    second."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    frequencies = scaled(torch.pow(config.rope_theta, exponents).reciprocal(), config.rope_scaling)
    angles = torch.outer(torch.arange(num_positions, dtype=torch.int64).float(), frequencies)
    return torch.cat((angles.cos(), angles.sin()), dim=-1)
