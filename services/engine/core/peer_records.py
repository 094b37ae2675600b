"""Records of blocks on their way from and to other engines, in memory that the server and the core
share."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from headwater.engine_core.system.ring import anonymous_memory, map_at_least

UInt8Array = npt.NDArray[np.uint8]


def create_record_memory() -> int:
    """A file descriptor to be inherited; the first process that maps the memory gives it its
    size."""
    return anonymous_memory("headwater-blocks", 0)


def map_records(memory: int, num_rows: int, row_bytes: int) -> UInt8Array:
    """uint8 [num_rows, row_bytes], a record each."""
    return np.frombuffer(map_at_least(memory, num_rows * row_bytes), np.uint8).reshape(
        num_rows, row_bytes
    )
