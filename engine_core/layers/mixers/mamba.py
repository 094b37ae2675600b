"""A layer of Mamba-2, which keeps a state in the place of keys and values. Source: Dao and Gu,
"Transformers are SSMs", 2024."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from headwater.kernels.mamba.mamba_layer import MambaLayer

from ..batch import ForwardBatch
from ..linear.linear import Linear
from ..platform import MambaPlatform
from ..state_rows import state_memory


class Mamba:
    """A mixer with the two calls of `Attention`: the heads, and the output product."""

    def __init__(
        self,
        platform: MambaPlatform,
        parts: Linear,
        o: Linear,
        norm: Callable[[torch.Tensor], torch.Tensor],
        layer: MambaLayer,
        *,
        first_unit: int,
        factors: torch.Tensor | None = None,
    ) -> None:
        """`parts`: projection to what `layer` reads; `norm`: of gated outputs [T, heads ·
        head_dim]; `o` [H, heads · head_dim]. `first_unit`: index of the layer's first unit among
        those of all layers. `factors`: multipliers of the projection's outputs; None: none."""
        self._platform = platform
        self._parts = platform.linear(parts)
        self._o = platform.linear(o)
        self._norm = norm
        self._layer = layer
        self._first_unit = first_unit
        self._factors = factors

    def queries(self, x: torch.Tensor, batch: ForwardBatch, pages: torch.Tensor) -> torch.Tensor:
        """x [T, H] → normed outputs [T, heads · head_dim]; states go to the pages, uint8
        [num_pages, page_bytes]."""
        assert batch.states is not None
        memory = state_memory(batch.states, pages, self._first_unit)
        parts = self._parts(x)
        if self._factors is not None:
            parts = parts * self._factors
        return self._norm(self._platform.mamba(parts, self._layer, memory))

    def attend(
        self, outputs: torch.Tensor, pages: torch.Tensor, attention_plan: Any
    ) -> torch.Tensor:
        """outputs [E, heads · head_dim] → [E, H]"""
        return self._o(outputs)

    def kept(self, outputs: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """The outputs of some tokens alone, integers [E]."""
        return outputs.index_select(0, tokens)
