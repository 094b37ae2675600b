"""Weights of an expert that every token has beside those that a router chooses."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, eq=False)
class SharedExpert:
    """Weights of an expert that every token has, of the same sizes as the others."""

    gate_up: torch.Tensor
    """[2 I, H], gates first."""
    down: torch.Tensor
    """[H, I]"""
    gate: torch.Tensor | None
    """[1, H], whose product's sigmoid is the expert's share; None: it is added as it is."""
