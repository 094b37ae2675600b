"""Rotary embedding: cosines and sines of every position. Source: RoFormer; scaled as in
`rope_scaling`."""

from __future__ import annotations

import math

import torch

from ..weights.model_config import ModelConfig
from ..weights.rope.scaling import scaled


def cos_sin_table(config: ModelConfig, num_positions: int) -> torch.Tensor:
    """float32 [num_positions, head_dim]: cosines in the first half of a row, sines in the second.
    What depends on a length depends on `num_positions`, the same for every sequence of an
    engine. Numbers of a head that do not rotate have 1 and 0."""
    width = config.rotary_dim or config.head_dim
    exponents = torch.arange(0, width, 2, dtype=torch.int64).float() / width
    frequencies, factor = scaled(config.rope_theta, exponents, config.rope_scaling, num_positions)
    angles = torch.outer(torch.arange(num_positions, dtype=torch.int64).float(), frequencies)
    table = unrotated_table(config, num_positions)
    half = config.head_dim // 2
    table[:, : width // 2] = angles.cos() * factor
    table[:, half : half + width // 2] = angles.sin() * factor
    return table


def unrotated_table(config: ModelConfig, num_positions: int) -> torch.Tensor:
    """Like `cos_sin_table`, for a layer whose positions rotate nothing."""
    table = torch.zeros(num_positions, config.head_dim)
    table[:, : config.head_dim // 2] = 1
    return table


def query_scales(beta: float, original: float, num_positions: int) -> torch.Tensor:
    """float32 [num_positions]: 1 + beta * log(1 + floor(position / original))."""
    positions = torch.arange(num_positions, dtype=torch.float32)
    return 1 + beta * torch.log(1 + torch.floor(positions / math.floor(original)))
