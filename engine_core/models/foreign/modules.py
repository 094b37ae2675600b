"""Modules that stand in a transformers module for its own: linear layers, embeddings, activations
and rotary tables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ...config import ConfigError, require
from ...layers.linear.linear import Linear
from ...layers.platform import Platform
from .row_wise import RowWise

ACTIVATIONS = {
    "SiLU": "silu",
    "SiLUActivation": "silu",
    "GELUActivation": "gelu",
    "GELUTanh": "gelu_tanh",
    "NewGELUActivation": "gelu_tanh",
    "PytorchGELUTanh": "gelu_tanh",
    "ReLU": "relu",
    "Tanh": "tanh",
    "Sigmoid": "sigmoid",
}
"""Names in `Platform.activation` by the library's classes."""


class OwnLinear(nn.Module):
    """A linear layer of any kind, by its platform's product."""

    def __init__(
        self, platform: Platform, linear: Linear, bias: torch.Tensor | None, mode: RowWise
    ) -> None:
        """bias [N]. Raises `ConfigError` for layers that read tokens in 8 bits, which no norm here
        makes."""
        super().__init__()
        allowed = "model with code of transformers, of which no norm is rounded"
        require(linear.rounds_to is None, "activation_dtype", "auto", allowed)
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self._product = platform.linear(linear)
        self._bias = bias
        self._mode = mode

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [1, T, K] → [1, T, N]"""
        with self._mode.aside():
            if self._mode.is_dry:
                return x.new_zeros(*x.shape[:-1], self.out_features)
            made = self._product(x.reshape(-1, x.shape[-1]).contiguous())
            made = made if self._bias is None else made + self._bias
            return made.view(*x.shape[:-1], made.shape[-1])


class OwnEmbedding(nn.Module):
    """An embedding whose table may be packed."""

    def __init__(self, rows: Callable[[torch.Tensor], torch.Tensor], mode: RowWise) -> None:
        super().__init__()
        self._rows = rows
        self._mode = mode

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """token_ids [1, T] → [1, T, H]"""
        with self._mode.aside():
            return self._rows(token_ids.flatten()).unsqueeze(0)


class OwnActivation(nn.Module):
    """An activation that the platform computes."""

    def __init__(self, platform: Platform, name: str, mode: RowWise) -> None:
        super().__init__()
        self._platform = platform
        self._name = name
        self._mode = mode

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with self._mode.aside():
            return self._platform.activation(x.contiguous(), self._name)


class StandIn(nn.Module):
    """Replaces a submodule, and forwards all other attributes to it."""

    def __init__(self, part: nn.Module, mode: RowWise) -> None:
        super().__init__()
        self._part = part
        self._mode = mode

    def __getattr__(self, name: str) -> Any:
        if name in self.__dict__["_modules"]:
            return self.__dict__["_modules"][name]
        return getattr(self.__dict__["_modules"]["_part"], name)


class Unjudged(StandIn):
    """Computes what its submodule does with functions that are not examined: it makes a table
    once."""

    def forward(self, *given: Any, **keywords: Any) -> Any:
        with self._mode.aside():
            return self._part(*given, **keywords)


def is_rotary(module: nn.Module) -> bool:
    """Whether a module makes cosines and sines of positions."""
    return type(module).__name__.endswith("RotaryEmbedding")


class RotaryTable(StandIn):
    """Cosines and sines of every position, made once by the module that it stands for: a row's are
    then the same in any batch."""

    def __init__(
        self, part: nn.Module, mode: RowWise, num_positions: int, device: torch.device
    ) -> None:
        super().__init__(part, mode)
        self._positions = torch.arange(num_positions, device=device).unsqueeze(0)
        self._tables: dict[object, tuple[torch.Tensor, ...]] = {}

    def forward(
        self, x: torch.Tensor, position_ids: torch.Tensor, *more: Any, **keywords: Any
    ) -> tuple[torch.Tensor, ...]:
        """Tensors [1, T, …] of positions [1, T]."""
        key = (x.dtype, more, tuple(sorted(keywords.items())))
        if key not in self._tables:
            with self._mode.aside():
                self._tables[key] = self._made(x, *more, **keywords)
        at = position_ids.flatten()
        return tuple(table.index_select(1, at) for table in self._tables[key])

    def _made(self, x: torch.Tensor, *more: Any, **keywords: Any) -> tuple[torch.Tensor, ...]:
        made = self._part(x[:, :1], self._positions, *more, **keywords)
        num_positions = self._positions.shape[1]
        is_table = isinstance(made, tuple) and all(
            each.dim() == 3 and each.shape[:2] == (1, num_positions) for each in made
        )
        if not is_table:
            allowed = "rotary tables [1, positions, numbers of a head]"
            raise ConfigError("modelling code", type(self._part).__name__, allowed)
        return tuple(each.contiguous() for each in made)
