"""A GPU: the stream of its steps, their ends, and the graphs of their launches."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager

import torch

from ...config import EngineConfig
from ...executor import Executor
from .cuda_graphs import Graphs

SPIN_SECONDS = 0.0005
"""Time for which the end of a draw is looked for before the thread sleeps until it."""


class CudaDevice:
    """See `Device`."""

    computes_at_once = False

    def __init__(self, device: torch.device, config: EngineConfig) -> None:
        self.device = device
        self.num_parts = config.most_in_flight
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch ships it so
        # A thread that waits for a step sleeps: the next step is in flight, so the device need not
        # wait for it.
        self._done = [torch.cuda.Event(blocking=True) for _ in range(self.num_parts)]  # type: ignore[no-untyped-call]  # torch ships it so
        self._graphs: list[Graphs] = []

    def new_graphs(self) -> Graphs:
        """Makes the graphs of a model. Graphs that are due are captured at the end of a step."""
        self._graphs.append(Graphs())
        return self._graphs[-1]

    def begin(self) -> None:
        """Makes steps wait for launches on the current stream, on which weights, caches, tables and
        workspaces are made."""
        self._stream.wait_stream(torch.cuda.current_stream(self.device))

    def launching(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._stream)

    def end(self, step: int) -> None:
        self._done[step % self.num_parts].record(self._stream)
        for graphs in self._graphs:
            graphs.capture_due()

    def is_done(self, step: int) -> bool:
        return bool(self._done[step % self.num_parts].query())  # type: ignore[no-untyped-call]  # torch ships it so

    def wait(self, step: int, *, spins: bool) -> None:
        """See `Device`. A draw is awaited by spinning: the device waits for masks that are made
        from its tokens, and waking a sleeping thread would take a large part of the draw's time.
        After a step another one is in flight, so the thread sleeps."""
        end = time.perf_counter() + SPIN_SECONDS * spins
        while spins and not self.is_done(step) and time.perf_counter() < end:
            pass
        self._done[step % self.num_parts].synchronize()

    def finish(self) -> None:
        torch.cuda.synchronize(self.device)

    def warm_up(self, executor: Executor) -> float:
        """Does nothing: captured graphs have run once."""
        return 0.0
