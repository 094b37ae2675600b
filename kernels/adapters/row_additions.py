"""Low-rank adapters of rows on an NVIDIA GPU, as a platform offers them: the first factor in a
branch of a graph beside the layer's product."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cached_property

import torch

from ..attention import hopper_attention
from .adapter_tiles import AdapterTiles, adapter_tiles
from .expand import expand, expand_gated
from .hopper_shrink import shrink_pieces
from .shrink import shrink, shrunk_like
from .slab import Slab, SlabLayer

COPIED = 16
"""Numbers that a layer's inputs are a multiple of where they are copied by whole lines."""
BESIDE_ROWS = 128
"""Most rows whose product leaves room beside it for programs of the first factor. On an H200 four
layers of 8B take 42 us more than without adapters for 256 rows with one, 53 by `shrink`; for 64
rows with 64 adapters 72 and 67 (2026-11-30)."""


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

    def fork(self) -> None:
        """Starts the branch after everything launched so far."""
        if torch.cuda.is_current_stream_capturing():
            self._stream.wait_stream(torch.cuda.current_stream())

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Context whose launches go to the branch; launches after it wait for them."""
        if not torch.cuda.is_current_stream_capturing():
            yield
            return
        with torch.cuda.stream(self._stream):
            yield
        torch.cuda.current_stream().wait_stream(self._stream)


class CudaAddition:
    """Addition of one layer's adapters. With few rows, x Aᵀ is computed beside the layer's product,
    on multiprocessors that the product leaves free. It is launched after the product: launched
    first, it would take room that the product needs."""

    def __init__(self, slab: Slab, layer: SlabLayer, branch: Branch) -> None:
        self._slab = slab
        self._layer = layer
        self._branch = branch
        numbers = slab.numbers
        self._is_copied = (
            hopper_attention.is_hopper(numbers.device)
            and numbers.element_size() == 2
            and layer.num_inputs % COPIED == 0
        )

    def begin(self, x: torch.Tensor, plan: AdapterTiles) -> torch.Tensor:
        """Memory for x Aᵀ that nothing before the product uses any more."""
        if plan.is_few:
            self._branch.fork()
        return shrunk_like(x, plan, self._layer)

    def finish(
        self, x: torch.Tensor, y: torch.Tensor, begun: torch.Tensor, plan: AdapterTiles
    ) -> None:
        self._shrink(x, begun, plan)
        expand(begun, y, plan, self._slab, self._layer, dependent=plan.is_few)

    def finish_gated(
        self,
        x: torch.Tensor,
        y: torch.Tensor,
        begun: torch.Tensor,
        plan: AdapterTiles,
        activation: str,
    ) -> torch.Tensor:
        """Gates of y [T, 2 I] with its products added, times the other half: [T, I]. activation:
        silu or gelu_tanh."""
        self._shrink(x, begun, plan)
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

    def _shrink(self, x: torch.Tensor, begun: torch.Tensor, plan: AdapterTiles) -> None:
        is_crowded = plan.is_few and plan.num_rows > BESIDE_ROWS
        is_copied = self._is_copied and x.stride(0) % COPIED == 0
        launch = shrink_pieces if is_crowded and is_copied else shrink
        with self._branch.beside() if plan.is_few else nullcontext():
            launch(x, begun, plan, self._slab, self._layer)
