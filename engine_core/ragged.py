"""Runs of different lengths, concatenated in one array."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .executor import Int32Array


def places(counts: Int32Array) -> Int32Array:
    """Index of each element in its run: 0 … counts[0] − 1, 0 … counts[1] − 1 and so on, int32."""
    if (counts == 1).all():
        return np.zeros(counts.size, np.int32)
    ends = np.cumsum(counts)
    starts = np.repeat(ends - counts, counts)
    return (np.arange(ends[-1] if ends.size else 0, dtype=np.int32) - starts).astype(np.int32)


def run_lengths(values: Int32Array) -> Int32Array:
    """Lengths of the runs of equal values; values are not negative."""
    ends = np.flatnonzero(np.diff(values, prepend=-1, append=-1))
    return np.diff(ends).astype(np.int32)


def last_elements(counts: Int32Array, num_kept: Int32Array) -> npt.NDArray[np.int64]:
    """Indices of the last num_kept[r] elements of each run, int64."""
    ends = np.cumsum(counts, dtype=np.int64)
    first: npt.NDArray[np.int64] = np.repeat(ends - num_kept, num_kept)
    return first + places(num_kept)
