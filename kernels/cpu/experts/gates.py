"""Gates of experts, between their two products, on a CPU."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .. import silu_mul
from ..activation import activation


def squared_relu(x: torch.Tensor) -> torch.Tensor:
    """The square of relu, of the same shape and dtype as x, contiguous; rounded once."""
    positive = activation(x, "relu")
    return positive * positive


GATES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    **silu_mul.GATES,
    "relu2": squared_relu,
}
"""Functions of gates, by the name of the activation that `ExpertPlatform.experts` takes."""
