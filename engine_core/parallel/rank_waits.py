"""Waits of one rank for other ranks, with their limits."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator


class RankWaits:
    def __init__(self, on_change: Callable[[bool], None] = lambda waits: None) -> None:
        """`on_change` is called when the rank begins to wait, and when it no longer does."""
        self._on_change = on_change
        self.seconds = 0.0
        """Sum of all waits."""

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Scope of one wait."""
        began = time.perf_counter()
        self._on_change(True)
        yield
        self._on_change(False)
        self.seconds += time.perf_counter() - began
