"""CUDA graphs by a key of everything that is fixed in them. Knows nothing about steps."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from headwater.kernels.launch.graph_capture import capturing

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Captured(Generic[T]):
    """A captured graph and its result; each replay overwrites the result in place."""

    graph: torch.cuda.CUDAGraph
    result: T


class Graphs:
    """CUDA graphs that share one memory pool: a result is valid until a graph that was captured
    earlier is replayed."""

    def __init__(self) -> None:
        self._captured: dict[Hashable, Captured[Any]] = {}
        self._seen: set[Hashable] = set()
        self._due: dict[Hashable, Callable[[], Any]] = {}
        self._pool: Any = None

    def __contains__(self, key: Hashable) -> bool:
        return key in self._captured

    def run(self, key: Hashable, launch: Callable[[], T]) -> T:
        """Launches on the current stream: as it is until `capture_due`, for which it is due the
        second time."""
        if key in self._captured:
            return self.replay(key, launch, _nothing)
        if key in self._seen:
            self._due[key] = launch
        self._seen.add(key)
        return launch()

    def capture_due(self) -> None:
        """Captures the graphs that are due. It is called when all of a step is launched, which
        keeps the device busy."""
        while self._due:
            key, launch = self._due.popitem()
            self._captured[key] = self._capture(launch)

    def replay(self, key: Hashable, launch: Callable[[], T], trial: Callable[[], object]) -> T:
        """Like `run`, and captures the graph if `prepare` has not."""
        result = self.prepare(key, launch, trial)
        self._captured[key].graph.replay()
        return result

    def prepare(self, key: Hashable, launch: Callable[[], T], trial: Callable[[], object]) -> T:
        """Captures a launch that is not captured yet. Only `trial` is launched: it must launch each
        kernel of the whole once and leave its inputs unchanged. The result has its memory, but no
        values yet."""
        if key not in self._captured:
            trial()
            self._captured[key] = self._capture(launch)
        result: T = self._captured[key].result
        return result

    def run_once(self, key: Hashable, launch: Callable[[], None]) -> None:
        """Runs a launch that changes its own inputs, once."""
        if key in self._captured:
            self._captured[key].graph.replay()
        else:
            launch()
            self._captured[key] = self._capture(launch)

    def _capture(self, launch: Callable[[], T]) -> Captured[T]:
        # Kernels have been launched outside a graph: they are compiled, and libraries have their
        # handles.
        graph = torch.cuda.CUDAGraph()
        with capturing(graph, self._pool):
            result = launch()
        self._pool = graph.pool()
        return Captured(graph, result)


def _nothing() -> None:
    pass
