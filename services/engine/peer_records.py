"""Records of blocks on their way from and to other engines, in memory that the server and the core share."""

from __future__ import annotations

import mmap
import os

import numpy as np
import numpy.typing as npt

from headwater.engine_core.ring import anonymous_memory

UInt8Array = npt.NDArray[np.uint8]


def create_record_memory() -> int:
    """A file descriptor to be inherited; the memory has its size from whoever maps it first."""
    return anonymous_memory("headwater-blocks", 0)


def map_records(memory: int, num_rows: int, row_bytes: int) -> UInt8Array:
    """uint8 [num_rows, row_bytes], a record each."""
    num_bytes = num_rows * row_bytes
    if os.fstat(memory).st_size < num_bytes:
        os.ftruncate(memory, num_bytes)
    return np.frombuffer(mmap.mmap(memory, num_bytes), np.uint8).reshape(num_rows, row_bytes)
