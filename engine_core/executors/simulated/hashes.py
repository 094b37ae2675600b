"""Hashes by which the simulated executor makes numbers of tokens and positions."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ...executor import Int32Array

UInt64Array = npt.NDArray[np.uint64]
TOKEN_SALT = np.uint64(0x9E3779B97F4A7C15)
POSITION_SALT = np.uint64(0xC2B2AE3D27D4EB4F)


def hashes(token_ids: Int32Array, positions: Int32Array) -> UInt64Array:
    return mix(
        token_ids.astype(np.uint64) * TOKEN_SALT + positions.astype(np.uint64) * POSITION_SALT
    )


def mix(x: UInt64Array) -> UInt64Array:
    """The finalizer of splitmix64 (Steele, Lea, Flood 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
