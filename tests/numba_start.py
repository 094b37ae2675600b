"""Starts numba's compiler when it is imported. Half a second, even for a function whose machine code is on disk.

The process that stages are forked from imports it, so that no engine's core waits for it.
"""

from __future__ import annotations

from numba import njit


def _successor(x: int) -> int:
    return x + 1


njit("int64(int64)")(_successor)
