"""Activations without a gate, in plain torch. A GPU computes an element in the same way wherever it
stands; a CPU's libraries do not, see `kernels.cpu.activation`."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch.nn.functional import gelu, silu

ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": gelu,
    "gelu_tanh": lambda x: gelu(x, approximate="tanh"),
    "relu": torch.relu,
    "sigmoid": torch.sigmoid,
    "silu": silu,
    "tanh": torch.tanh,
}
"""Keyed by name; `gelu` has the error function, `gelu_tanh` its approximation by tanh."""


def activation_twin(x: torch.Tensor, name: str) -> torch.Tensor:
    """x of any shape → the same shape and dtype."""
    return ACTIVATIONS[name](x)
