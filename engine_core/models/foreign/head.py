"""A transformers module's way from hidden states to logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ...layers.linear.linear import Linear
from .library import output_of
from .row_wise import RowWise


class GivenStates(nn.Module):
    """Takes the place of the base model while the module's head computes logits."""

    hidden: torch.Tensor

    def put_in(self, module: Any) -> None:
        """Installs it as the module's base model."""
        module.add_module(module.base_model_prefix, self)

    def forward(self, *_: Any, **__: Any) -> Any:
        return output_of(self.hidden)


class ModuleHead(Linear):
    """The module's own path from hidden states to logits: its head, with scaling or caps."""

    kind = "head of a module"

    def __init__(self, module: Any, own: Linear, mode: RowWise) -> None:
        """`own`: the linear layer of the head, without the module around it."""
        self.out_features = own.out_features
        self.in_features = own.in_features
        self._module = module
        self._mode = mode
        self._given = GivenStates()
        self._given.put_in(module)

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """x [S, K] → [S, V]"""
        self._given.hidden = x.unsqueeze(0)
        with self._mode:
            logits: torch.Tensor = self._module(x.new_zeros(1, len(x)).long()).logits
        return logits.squeeze(0).to(x.dtype)
