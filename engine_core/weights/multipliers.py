"""Factors of what the parts of a layer make, of models that were trained with them. Source: TII,
"Falcon-H1", 2025."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Multipliers:
    projections: tuple[float, ...]
    """Factors of Mamba-2's gates, values, keys, queries and steps."""
    mamba_in: float
    """Factor of Mamba-2's inputs."""
    mamba_out: float
    attention_out: float
    mlp: tuple[float, ...]
    """Factors of the MLP's gates, and of its outputs."""
