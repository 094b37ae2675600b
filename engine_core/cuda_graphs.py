"""Decode steps as CUDA graphs, one for each number of rows. Knows what a decode step launches, not who asks for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

SIZES = (1, 2, 4, 8, *range(16, 129, 16), *range(160, 513, 32))
# What the collector of garbage or another thread gives back to CUDA meanwhile is no part of the graph.
_MODE = "relaxed"


@dataclass(frozen=True, slots=True)
class StepGraph:
    """Forward and sampling are two graphs, so that rows which need more than a plain draw gate the sampling alone."""

    forward: torch.cuda.CUDAGraph
    hidden: torch.Tensor
    draw: torch.cuda.CUDAGraph


class DecodeGraphs:
    """Captured when a size is first asked for, or ahead by `capture_all`."""

    def __init__(
        self,
        max_rows: int,
        forward: Callable[[int], torch.Tensor],
        draw: Callable[[int, torch.Tensor], object],
        stream: torch.cuda.Stream,
    ) -> None:
        self._sizes = sorted({size for size in SIZES if size < max_rows} | {max_rows})
        self._forward, self._draw, self._stream = forward, draw, stream
        self._graphs: dict[int, StepGraph] = {}
        self._pool: Any = None

    def size_for(self, num_rows: int) -> int:
        return next(size for size in self._sizes if size >= num_rows)

    def of(self, size: int) -> StepGraph:
        if size not in self._graphs:
            self._graphs[size] = self._capture(size)
        return self._graphs[size]

    def capture_all(self) -> None:
        # Large ones first: the small then fit into the memory that those left.
        for size in reversed(self._sizes):
            self.of(size)

    def _capture(self, size: int) -> StepGraph:
        # Once outside a graph, so that kernels are compiled and libraries have their handles.
        self._draw(size, self._forward(size))
        self._stream.synchronize()
        forward, draw = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(forward, pool=self._pool, stream=self._stream, capture_error_mode=_MODE):
            hidden = self._forward(size)
        self._pool = forward.pool()
        with torch.cuda.graph(draw, pool=self._pool, stream=self._stream, capture_error_mode=_MODE):
            self._draw(size, hidden)
        return StepGraph(forward, hidden, draw)
