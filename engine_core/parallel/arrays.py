"""Numpy arrays in one message: numbers first, then arrays of known types, any of which may be
missing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

_ALIGNMENT = 8
_MISSING = -1
Array = np.ndarray[Any, np.dtype[Any]]


def pack(numbers: Sequence[int], arrays: Sequence[Array | None]) -> bytes:
    sizes = [_MISSING if array is None else array.nbytes for array in arrays]
    parts = [np.array([len(numbers), *numbers, *sizes], np.int64).tobytes()]
    for array, size in zip(arrays, sizes, strict=True):
        if array is not None and size:
            parts += [array.tobytes(), bytes(-size % _ALIGNMENT)]
    return b"".join(parts)


def unpack(message: bytes, dtypes: Sequence[type]) -> tuple[list[int], list[Array | None]]:
    """The numbers and the arrays [N] of these types, in the order in which they were packed. Arrays
    may be written."""
    memory = bytearray(message)
    count = int(np.frombuffer(memory, np.int64, 1)[0])
    head = np.frombuffer(memory, np.int64, 1 + count + len(dtypes)).tolist()
    at = 8 * len(head)
    arrays = list[Array | None]()
    for dtype, size in zip(dtypes, head[1 + count :], strict=True):
        if size == _MISSING:
            arrays.append(None)
            continue
        arrays.append(np.frombuffer(memory, dtype, size // np.dtype(dtype).itemsize, at))
        at += size + -size % _ALIGNMENT
    return head[1 : 1 + count], arrays
