"""Scaling of the frequencies of rotary positions. Sources: as transformers publishes them; Peng et
al., "YaRN", 2023; Ding et al., "LongRoPE", 2024."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

Scaling = Mapping[str, Any]
Scaled = tuple[torch.Tensor, float]
"""Frequencies [width / 2], and a factor of cosines and sines."""


def scaled(
    theta: float, exponents: torch.Tensor, scaling: Scaling | None, num_positions: int
) -> Scaled:
    """Frequencies theta ** -exponents [width / 2] as a model's `rope_scaling` has them, and the
    factor of their cosines and sines. `num_positions`: the longest sequence of the engine."""
    if scaling is None:
        return torch.pow(theta, exponents).reciprocal(), 1.0
    kind: str = scaling["rope_type"]
    if kind == "dynamic":
        theta = _stretched_base(theta, 2 * len(exponents), scaling, num_positions)
        return torch.pow(theta, exponents).reciprocal(), 1.0
    powers = torch.pow(theta, exponents)
    if kind == "longrope":
        return _longrope(powers, scaling, num_positions)
    return _KINDS[kind](powers.reciprocal(), theta, scaling), scaling.get("attention_factor", 1.0)


def _stretched_base(theta: float, width: int, scaling: Scaling, num_positions: int) -> float:
    original = scaling["original_max_position_embeddings"]
    factor = scaling["factor"]
    length = max(num_positions, original)
    stretch = factor * length / original - (factor - 1)
    return float(theta * stretch ** (width / (width - 2)))


def _longrope(powers: torch.Tensor, scaling: Scaling, num_positions: int) -> Scaled:
    is_long = num_positions > scaling["original_max_position_embeddings"]
    factors = torch.tensor(scaling["long_factor" if is_long else "short_factor"])
    return (factors * powers).reciprocal(), scaling["attention_factor"]


def _linear(frequencies: torch.Tensor, theta: float, scaling: Scaling) -> torch.Tensor:
    linear: torch.Tensor = frequencies / scaling["factor"]
    return linear


def _llama3(frequencies: torch.Tensor, theta: float, scaling: Scaling) -> torch.Tensor:
    """Long wavelengths are stretched, short ones kept, those between interpolated."""
    factor = scaling["factor"]
    original = scaling["original_max_position_embeddings"]
    low = scaling["low_freq_factor"]
    high = scaling["high_freq_factor"]
    wavelengths = 2 * math.pi / frequencies
    blend = (original / wavelengths - low) / (high - low)
    blended = (1 - blend) * frequencies / factor + blend * frequencies
    stretched = torch.where(wavelengths > original / low, frequencies / factor, blended)
    return torch.where(wavelengths < original / high, frequencies, stretched)


def _yarn(frequencies: torch.Tensor, theta: float, scaling: Scaling) -> torch.Tensor:
    """Frequencies with many turns within the original length are kept, those with few stretched,
    those between interpolated."""
    width = 2 * len(frequencies)

    def place(num_turns: float) -> float:
        original = scaling["original_max_position_embeddings"]
        return width * math.log(original / (num_turns * 2 * math.pi)) / (2 * math.log(theta))

    low = place(scaling["beta_fast"])
    high = place(scaling["beta_slow"])
    if scaling["truncate"]:
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, width - 1)
    if low == high:
        high += 0.001
    places = torch.arange(len(frequencies), dtype=torch.float32)
    kept = 1 - torch.clamp((places - low) / (high - low), 0, 1)
    interpolated = (scaling["factor"] * frequencies.reciprocal()).reciprocal()
    blended: torch.Tensor = interpolated * (1 - kept) + frequencies * kept
    return blended


def _proportional(frequencies: torch.Tensor, theta: float, scaling: Scaling) -> torch.Tensor:
    """The first frequencies rotate, the others do not."""
    num_rotated = int(scaling["share"] * 2 * len(frequencies) // 2)
    rotated = frequencies.clone()
    rotated[num_rotated:] = 0
    return rotated / float(scaling["factor"])


_KINDS: dict[str, Callable[[torch.Tensor, float, Scaling], torch.Tensor]] = {
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "proportional": _proportional,
}
