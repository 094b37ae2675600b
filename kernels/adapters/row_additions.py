"""Low-rank adapters of rows on an NVIDIA GPU, as a platform offers them: the first factor in a
branch of a graph beside the layer's product."""

from __future__ import annotations

from functools import cached_property

import torch

from .adapter_tiles import AdapterTiles, adapter_tiles
from .expand import expand, expand_gated
from .shrink import shrink, shrunk_like
from .slab import Slab, SlabLayer


class RowAdditions:
    """Operations of a platform for adapters."""

    def plan_adapters(self, slots: torch.Tensor, slab: Slab) -> AdapterTiles:
        return adapter_tiles(slots, slab.num_ranks)

    def adapter_addition(self, slab: Slab, layer: SlabLayer) -> CudaAddition:
        return CudaAddition(slab, layer, self._branch)

    @cached_property
    def _branch(self) -> Branch:
        return Branch()


class Branch:
    """Launches of a graph beside those of the current stream. Outside of a capture they are made on
    the current stream: the host would take longer than it saves."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()

    def begin(self) -> torch.cuda.Stream | None:
        """The stream of the branch, which begins after what is launched so far; None: there is
        none."""
        if not torch.cuda.is_current_stream_capturing():
            return None
        self._stream.wait_stream(torch.cuda.current_stream())
        return self._stream

    def end(self) -> None:
        """Launches from now on wait for the branch, if there is one."""
        if torch.cuda.is_current_stream_capturing():
            torch.cuda.current_stream().wait_stream(self._stream)


class CudaAddition:
    """Addition of one layer. Of few rows, x Aᵀ is computed beside the layer's product, which waits
    for memory most of the time."""

    def __init__(self, slab: Slab, layer: SlabLayer, branch: Branch) -> None:
        self._slab = slab
        self._layer = layer
        self._branch = branch

    def begin(self, x: torch.Tensor, plan: AdapterTiles) -> torch.Tensor:
        shrunk = shrunk_like(x, plan, self._layer)
        stream = self._branch.begin() if plan.is_few else None
        with torch.cuda.stream(stream):
            shrink(x, shrunk, plan, self._slab, self._layer)
        return shrunk

    def finish(
        self, x: torch.Tensor, y: torch.Tensor, begun: torch.Tensor, plan: AdapterTiles
    ) -> None:
        self._join(plan)
        expand(begun, y, plan, self._slab, self._layer, dependent=plan.is_few)

    def finish_gated(
        self, y: torch.Tensor, begun: torch.Tensor, plan: AdapterTiles, activation: str
    ) -> torch.Tensor:
        """The gates of y [T, 2 I] with its products added, times the other half: [T, I].
        activation: silu or gelu_tanh."""
        self._join(plan)
        out = y.new_empty(len(y), y.shape[1] // 2)
        expand_gated(
            begun,
            y,
            out,
            plan,
            self._slab,
            self._layer,
            is_gelu=activation == "gelu_tanh",
            dependent=plan.is_few,
        )
        return out

    def _join(self, plan: AdapterTiles) -> None:
        if plan.is_few:
            self._branch.end()
