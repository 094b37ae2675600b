"""An event loop whose time passes only while nothing is left to do: hours take seconds, and the
order is always the same.

Code on it takes its time from `loop.time()` and does no real input or output.
"""

from __future__ import annotations

import asyncio
import random
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


class Stuck(RuntimeError):
    """Every task waits for something that will never happen."""


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._now = 0.0
        super().__init__(_Skipping(self))

    def time(self) -> float:
        return self._now

    def skip(self, seconds: float) -> None:
        self._now += seconds


class _Skipping(selectors.SelectSelector):
    """Selector that moves the loop's clock instead of waiting."""

    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise Stuck(f"nothing is due at {self._loop.time():.3f} s")
        self._loop.skip(max(0.0, timeout))
        return []


def run_virtually(main: Coroutine[Any, Any, Result], seed: int) -> Result:
    """Runs `main` and returns its result. The same program and seed take the same steps in the same
    order."""
    random.seed(seed)
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
