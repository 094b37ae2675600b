"""A transformers module with weights, and with parts of ours in the place of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...config import ConfigError
from ...layers.embedding import Embedding
from ...layers.linear.kinds import Weights
from ...layers.platform import Platform
from .interface import ATTENTION
from .library import module_of
from .modules import (
    ACTIVATIONS,
    OwnActivation,
    OwnEmbedding,
    OwnLinear,
    RotaryTable,
    is_rotary,
)
from .probe import EMBED, facts_of, linears_of
from .row_wise import RowWise


@dataclass(frozen=True, slots=True)
class OwnParts:
    """Parts of ours over a model's weights."""

    platform: Platform
    weights: Weights
    mode: RowWise
    max_model_len: int

    def put_in(self, hf_config: Mapping[str, Any], embedding: Embedding) -> nn.Module:
        """The architecture's module with these parts. Raises `ConfigError`."""
        names = facts_of(hf_config).names
        module = module_of(hf_config, ATTENTION, embedding.dtype, "cpu")
        self._put_linears(module, names)
        self._put_tensors(module, names, embedding)
        self._put_functions(module)
        return module

    def _put_linears(self, module: nn.Module, names: Mapping[str, str]) -> None:
        for name in linears_of(module):
            linear = self.weights.linears[names[name + ".weight"]]
            bias = self.weights.tensors.get(names.get(name + ".bias", ""))
            _replace(module, name, OwnLinear(self.platform, linear, bias, self.mode))

    def _put_tensors(
        self, module: nn.Module, names: Mapping[str, str], embedding: Embedding
    ) -> None:
        """Gives a module the weights that are not those of linear layers."""
        for theirs, ours in names.items():
            prefix, _, own = theirs.rpartition(".")
            owner = module.get_submodule(prefix)
            if isinstance(owner, OwnLinear):
                continue
            if ours == EMBED and type(owner) is nn.Embedding:
                _replace(module, prefix, OwnEmbedding(embedding, self.mode))
            elif own in owner._parameters:
                owner._parameters[own] = nn.Parameter(self._plain(ours), requires_grad=False)
            else:
                owner._buffers[own] = self._plain(ours)

    def _put_functions(self, module: nn.Module) -> None:
        """Rotary tables and activations; all other buffers go to the platform's device."""
        device = self.platform.device
        for name, each in list(module.named_modules()):
            for own, tensor in each._buffers.items():
                each._buffers[own] = None if tensor is None else tensor.to(device)
            if is_rotary(each):
                _replace(module, name, RotaryTable(each, self.mode, self.max_model_len, device))
            elif type(each).__name__ in ACTIVATIONS:
                activation = ACTIVATIONS[type(each).__name__]
                _replace(module, name, OwnActivation(self.platform, activation, self.mode))

    def _plain(self, name: str) -> torch.Tensor:
        """A weight that is no linear layer's. Raises `ConfigError` for a packed one."""
        table = self.weights.table(name)
        if isinstance(table, torch.Tensor):
            return table
        allowed = "one that is not, in code of transformers"
        raise ConfigError(f"tensor {name}", "packed", allowed)


def _replace(module: nn.Module, name: str, part: nn.Module) -> None:
    """Replaces every occurrence of a submodule object by `part`."""
    old = module.get_submodule(name)
    for owner in list(module.modules()):
        for own, each in owner._modules.items():
            if each is old:
                owner._modules[own] = part
