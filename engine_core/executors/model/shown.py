"""Readers of a model's hidden states within its forward pass."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch


class Shown(Protocol):
    """Reader of a model's hidden states."""

    layers: tuple[int, ...]
    """Layers whose inputs it reads."""

    def show(self, final: torch.Tensor, inputs: Mapping[int, torch.Tensor]) -> None:
        """Launches only. Normed hidden states, of all tokens or of the ends, and the layers' inputs
        [T, H]."""


class NotShown:
    """See `Shown`: reads nothing."""

    layers: tuple[int, ...] = ()

    def show(self, final: torch.Tensor, inputs: Mapping[int, torch.Tensor]) -> None:
        pass
