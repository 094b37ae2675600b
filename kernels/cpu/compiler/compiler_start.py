"""Starts numba's compiler when imported. That takes half a second, once in a process, even for a
function whose machine code is on disk. A process that is forked to compute imports it, so that no
fork waits for it."""

from __future__ import annotations

from numba import njit


def _successor(x: int) -> int:
    return x + 1


njit("int64(int64)")(_successor)
