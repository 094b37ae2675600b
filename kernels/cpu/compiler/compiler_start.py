"""Starts numba's compiler when it is imported. That takes half a second, once in a process, even
for a function whose machine code is on disk; a process whose forks compute imports it, so that none
of them waits for it."""

from __future__ import annotations

from numba import njit


def _successor(x: int) -> int:
    return x + 1


njit("int64(int64)")(_successor)
