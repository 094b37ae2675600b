"""A gated delta net, which keeps a state in the place of keys and values. Source: Yang et al.,
"Gated delta networks", 2024."""

from __future__ import annotations

from typing import Any

import torch

from headwater.kernels.delta.delta_arguments import DeltaLayer

from ..batch import ForwardBatch
from ..linear.linear import Linear, ProductPair, Tokens
from ..platform import PairingPlatform, StatePlatform
from ..state_rows import state_memory


class DeltaNet:
    """A mixer with the two calls of `Attention`: the heads, and the output product."""

    def __init__(
        self,
        platform: StatePlatform,
        wide: Linear,
        narrow: Linear,
        o: Linear,
        layer: DeltaLayer,
        *,
        first_unit: int,
    ) -> None:
        """wide makes queries, keys, values and output gates, narrow decays and shares, at the
        layer's places; o [H, value heads · value_dim]. `first_unit`: number of the layer's first
        unit among those of all layers."""
        self._platform = platform
        self._projections = _pair(platform, wide, narrow)
        self._o = platform.linear(o)
        self._layer = layer
        self._first_unit = first_unit

    def queries(self, x: torch.Tensor, batch: ForwardBatch, pages: torch.Tensor) -> torch.Tensor:
        """x [T, H] → gated and normed heads [T, value heads · value_dim]; states go to the pages,
        uint8 [num_pages, page_bytes]."""
        assert batch.states is not None
        memory = state_memory(batch.states, pages, self._first_unit)
        return self._platform.delta_net(*self._projections(x), self._layer, memory)

    def attend(self, heads: torch.Tensor, pages: torch.Tensor, attention_plan: Any) -> torch.Tensor:
        """heads [E, value heads · value_dim] → [E, H]"""
        return self._o(heads)

    def kept(self, heads: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """The heads of some tokens alone, integers [E]."""
        return heads.index_select(0, tokens)


def _pair(platform: StatePlatform, first: Linear, second: Linear) -> ProductPair:
    if isinstance(platform, PairingPlatform):
        return platform.linear_pair(first, second)
    products = platform.linear(first), platform.linear(second)

    def both(x: Tokens) -> tuple[torch.Tensor, torch.Tensor]:
        return products[0](x), products[1](x)

    return both
