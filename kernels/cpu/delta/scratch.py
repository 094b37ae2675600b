"""Scratch of a thread that computes gated delta nets, in float32: the state between borders of a
pass; keys, solved values and gates of a block that no page keeps; sums of decays [values,
block_size]; the mixed channels of a token; zeros [channels]; and, for each token before it in the
block, a decay, and weights of its solved values for the token's own and for its output.
"""

from __future__ import annotations

from typing import Any

from numba import njit

from ..compiler.compiled import argument
from ..compiler.simd_types import NUM_LANES
from . import places


@njit
def at_keys(arguments: int, p_scratch: int) -> Any:
    return p_scratch + 4 * state_size(arguments)


@njit
def at_solved(arguments: int, p_scratch: int) -> Any:
    size = argument(arguments, places.BLOCK_SIZE) * argument(arguments, places.KEY_DIM)
    return at_keys(arguments, p_scratch) + 4 * size


@njit
def at_gates(arguments: int, p_scratch: int) -> Any:
    size = (
        argument(arguments, places.NUM_VALUES)
        * argument(arguments, places.BLOCK_SIZE)
        * argument(arguments, places.VALUE_DIM)
    )
    return at_solved(arguments, p_scratch) + 4 * size


@njit
def at_sums(arguments: int, p_scratch: int) -> Any:
    return at_gates(arguments, p_scratch) + 8 * argument(arguments, places.BLOCK_SIZE) * argument(
        arguments, places.NUM_VALUES
    )


@njit
def at_mixed(arguments: int, p_scratch: int) -> Any:
    return at_sums(arguments, p_scratch) + 4 * argument(arguments, places.BLOCK_SIZE) * argument(
        arguments, places.NUM_VALUES
    )


@njit
def at_zeros(arguments: int, p_scratch: int) -> Any:
    return at_mixed(arguments, p_scratch) + 4 * num_channels(arguments)


@njit
def at_decays(arguments: int, p_scratch: int) -> Any:
    return at_zeros(arguments, p_scratch) + 4 * num_channels(arguments)


@njit
def at_key_weights(arguments: int, p_scratch: int) -> Any:
    return at_decays(arguments, p_scratch) + 4 * (
        argument(arguments, places.BLOCK_SIZE) + NUM_LANES
    )


@njit
def at_query_weights(arguments: int, p_scratch: int) -> Any:
    return at_key_weights(arguments, p_scratch) + 4 * (
        argument(arguments, places.BLOCK_SIZE) + NUM_LANES
    )


@njit
def state_size(arguments: int) -> Any:
    return (
        argument(arguments, places.NUM_VALUES)
        * argument(arguments, places.KEY_DIM)
        * argument(arguments, places.VALUE_DIM)
    )


@njit
def num_channels(arguments: int) -> Any:
    return 2 * argument(arguments, places.KEY_DIM) + argument(
        arguments, places.NUM_VALUES
    ) * argument(arguments, places.VALUE_DIM)
