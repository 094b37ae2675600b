"""Scaling of the frequencies of rotary positions. Source: as Llama 3 publishes it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch


def scaled(frequencies: torch.Tensor, scaling: Mapping[str, Any] | None) -> torch.Tensor:
    """Frequencies [head_dim / 2] as a model's `rope_scaling` has them."""
    if scaling is None:
        return frequencies
    if scaling["rope_type"] == "linear":
        linear: torch.Tensor = frequencies / scaling["factor"]
        return linear
    # llama3: long waves are stretched, short ones kept, those between blended.
    factor = scaling["factor"]
    original = scaling["original_max_position_embeddings"]
    low = scaling["low_freq_factor"]
    high = scaling["high_freq_factor"]
    wavelengths = 2 * math.pi / frequencies
    blend = (original / wavelengths - low) / (high - low)
    blended = (1 - blend) * frequencies / factor + blend * frequencies
    stretched = torch.where(wavelengths > original / low, frequencies / factor, blended)
    return torch.where(wavelengths < original / high, frequencies, stretched)
