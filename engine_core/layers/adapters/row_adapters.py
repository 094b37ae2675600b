"""Adapters of the rows that a forward pass computes: each row's own, behind any kind of linear
layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, cast

import torch

from headwater.kernels.adapters.slab import Slab, SlabLayer

from ...config import ConfigError
from ..linear.kinds import Weights
from ..linear.linear import Linear, Product
from ..platform import Platform
from .slab_layout import SlabLayout


class Addition(Protocol):
    """Adds the products of x [T, K] with a layer's adapters to y [T, N]; plans are the
    platform's."""

    def begin(self, x: torch.Tensor, plan: Any) -> Any:
        """Prepares launches beside the layer's product."""

    def finish(self, x: torch.Tensor, y: torch.Tensor, begun: Any, plan: Any) -> None:
        """Adds to the layer's product, in place."""


class GatedAddition(Addition, Protocol):
    """The addition for a layer whose outputs are a gate and the values that it multiplies."""

    def finish_gated(
        self, x: torch.Tensor, y: torch.Tensor, begun: Any, plan: Any, activation: str
    ) -> torch.Tensor:
        """`Platform.gate` of the layer's product y [T, 2 I] with the addition's: [T, I]. y is not
        used any more."""


class AdapterPlatform(Platform, Protocol):
    """A platform with the flag `adapters`."""

    def plan_adapters(self, slots: torch.Tensor, slab: Slab) -> Any:
        """Plan of rows for the additions of all layers; slots int32 [T], −1: no adapter."""

    def adapter_addition(self, slab: Slab, layer: SlabLayer) -> Addition:
        """The addition of one layer; see `kernels.adapters.adapter_product`. A row's bits do not
        depend on the others, and a row without an adapter is not written."""


class RowAdapters:
    """Adapters of the rows of the pass that is being computed."""

    def __init__(self, platform: AdapterPlatform, slab: Slab) -> None:
        self._platform = platform
        self._slab = slab
        self._slots: torch.Tensor | None = None
        self._plan: Any = None

    def begin(self, slots: torch.Tensor | None) -> None:
        """Begins a pass over rows with adapters in these slots, int32 [T]; None: no row has
        one."""
        self._slots = slots
        self._plan = None if slots is None else self._platform.plan_adapters(slots, self._slab)

    def keep(self, rows: torch.Tensor) -> None:
        """Goes on with some of the rows, in this order."""
        if self._slots is not None:
            self.begin(self._slots.index_select(0, rows))

    def adapted(self, linear: Linear, layer: SlabLayer) -> AdaptedLinear:
        addition = self._platform.adapter_addition(self._slab, layer)
        return AdaptedLinear(linear, self._platform, addition, self)

    def product(self, product: Product, addition: Addition, x: torch.Tensor) -> torch.Tensor:
        """A layer's product with those of the rows' adapters added to it."""
        if self._plan is None:
            return product(x)
        begun = addition.begin(x, self._plan)
        y = product(x)
        addition.finish(x, y, begun, self._plan)
        return y

    def gated_product(
        self,
        product: Product,
        base: Product,
        addition: GatedAddition,
        activation: str,
        x: torch.Tensor,
    ) -> torch.Tensor:
        """`Platform.gate` of what `product` returns. `base`: the same of rows without adapters."""
        if self._plan is None:
            return base(x)
        begun = addition.begin(x, self._plan)
        return addition.finish_gated(x, product(x), begun, self._plan, activation)


class AdaptedLinear(Linear):
    """A product, rounded, to which the products of the rows' adapters are added."""

    kind = "adapted"

    def __init__(
        self, linear: Linear, platform: Platform, addition: Addition, rows: RowAdapters
    ) -> None:
        """Raises `ConfigError` for a layer that reads activations of 8 bits."""
        if linear.rounds_to is not None:
            allowed = "model beside adapter_memory: adapters read activations as they are"
            raise ConfigError("activation_dtype", "auto", allowed)
        self.out_features = linear.out_features
        self.in_features = linear.in_features
        self._linear = linear
        self._platform = platform
        self._product = platform.linear(linear)
        self._addition = addition
        self._rows = rows

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, K] → [T, N]"""
        return self._rows.product(self._product, self._addition, x)

    def gated(self, activation: str) -> Product:
        """x [T, K] → [T, N / 2]: the platform's `gate` of the product, of a `GatedAddition`."""
        base = self._platform.gated_linear(self._linear, activation) or (
            lambda x: self._platform.gate(self._product(x), activation)
        )
        return partial(
            self._rows.gated_product,
            self._product,
            base,
            cast(GatedAddition, self._addition),
            activation,
        )


def with_adapters(weights: Weights, layout: SlabLayout, rows: RowAdapters) -> Weights:
    """The weights with adapters added to every layer that can have one. `rows`: the adapters of the
    rows of the current pass, which the model sets."""
    adapted: Mapping[str, Linear] = {
        name: rows.adapted(weights.linears[name], layer) for name, layer in layout.layers.items()
    }
    return replace(weights, linears={**weights.linears, **adapted}, adapters=rows)
