"""Rotary embedding: cosines and sines of every position. Source: RoFormer; scaling as Llama 3 publishes it."""

from __future__ import annotations

import math

import torch

from ..model_config import ModelConfig


def cos_sin_table(config: ModelConfig, num_positions: int) -> torch.Tensor:
    """float32 [num_positions, head_dim]: cosines in the first half of a row, sines in the second."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    frequencies = _scaled(torch.pow(config.rope_theta, exponents).reciprocal(), config)
    angles = torch.outer(torch.arange(num_positions, dtype=torch.int64).float(), frequencies)
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


def _scaled(frequencies: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    if scaling["rope_type"] == "linear":
        linear: torch.Tensor = frequencies / scaling["factor"]
        return linear
    # llama3: long waves are stretched, short ones kept, those between blended.
    factor, original = scaling["factor"], scaling["original_max_position_embeddings"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    wavelengths = 2 * math.pi / frequencies
    blend = (original / wavelengths - low) / (high - low)
    blended = (1 - blend) * frequencies / factor + blend * frequencies
    stretched = torch.where(wavelengths > original / low, frequencies / factor, blended)
    return torch.where(wavelengths < original / high, frequencies, stretched)
