"""A short causal convolution between gates, which keeps its last inputs in the place of keys and
values. Source: Liquid AI, "LFM2 technical report", 2025."""

from __future__ import annotations

from typing import Any

import torch

from headwater.kernels.conv.conv_layer import ConvLayer

from ..batch import ForwardBatch
from ..linear.linear import Linear
from ..platform import ConvPlatform
from ..state_rows import state_memory


class ShortConv:
    """A mixer with the two calls of `Attention`: the convolution, and the output product."""

    def __init__(
        self,
        platform: ConvPlatform,
        parts: Linear,
        o: Linear,
        layer: ConvLayer,
        *,
        first_unit: int,
    ) -> None:
        """parts [3 H, H] makes gates of inputs, gates of outputs, and inputs; o [H, H].
        `first_unit`: number of the layer's first unit among those of all layers."""
        self._platform = platform
        self._parts = platform.linear(parts)
        self._o = platform.linear(o)
        self._layer = layer
        self._first_unit = first_unit

    def queries(self, x: torch.Tensor, batch: ForwardBatch, pages: torch.Tensor) -> torch.Tensor:
        """x [T, H] → gated sums [T, H]; inputs go to the pages, uint8 [num_pages, page_bytes]."""
        assert batch.states is not None
        memory = state_memory(batch.states, pages, self._first_unit)
        return self._platform.short_conv(self._parts(x), self._layer, memory)

    def attend(self, sums: torch.Tensor, pages: torch.Tensor, attention_plan: Any) -> torch.Tensor:
        """sums [E, H] → [E, H]"""
        return self._o(sums)

    def kept(self, sums: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """The sums of some tokens alone, integers [E]."""
        return sums.index_select(0, tokens)
