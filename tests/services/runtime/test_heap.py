"""What native code has allocated, as the allocator says."""

from __future__ import annotations

import ctypes
import sys

import pytest

from headwater.services.runtime.heap import heap_bytes


@pytest.mark.skipif(sys.platform != "linux", reason="only glibc says it")
def test_native_memory_counts_while_it_is_allocated() -> None:
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    libc.free.argtypes = [ctypes.c_void_p]
    before = heap_bytes()
    large, small = libc.malloc(64 << 20), [libc.malloc(1 << 10) for _ in range(10_000)]
    during = heap_bytes()
    for each in (large, *small):
        libc.free(each)
    assert 70 << 20 < during - before < 90 << 20
    assert abs(heap_bytes() - before) < 10 << 20
