"""What a model's file holds: a name, a shape and a use for each weight, as the model declares them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSpec:
    shape: tuple[int, ...]
    """Of a linear layer (outputs, inputs), whatever its tensors look like."""
    is_linear: bool = False
    is_norm: bool = False
    tied_to: str = ""
    """Name of the weight whose tensors it shares; then the file has none of its own."""


Layout = Mapping[str, WeightSpec]
"""By name, in the order in which random weights are drawn."""


def linear(out_features: int, in_features: int, *, tied_to: str = "") -> WeightSpec:
    return WeightSpec(shape=(out_features, in_features), is_linear=True, tied_to=tied_to)


def norm(size: int) -> WeightSpec:
    return WeightSpec(shape=(size,), is_norm=True)


def table(*shape: int) -> WeightSpec:
    """Anything else: an embedding, a bias."""
    return WeightSpec(shape=shape)
