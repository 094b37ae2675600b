"""Scratch of a thread that computes gated delta nets, in float32: the state between borders of a
pass; keys, solved values and gates of a block that no page keeps; sums of decays [values,
block_size]; the mixed channels of a token; zeros [channels]; and, for each token before it in the
block, a decay, and weights of its solved values for the token's own and for its output; and, as
int64, addresses of the pieces of three states: those at the first and the last border, and that
one.
"""

from __future__ import annotations

from typing import Any

from numba import njit

from ..compiler.compiled import argument
from ..compiler.simd_types import NUM_LANES
from ..states import rows
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
def _at_pieces(arguments: int, p_scratch: int) -> Any:
    size = argument(arguments, places.BLOCK_SIZE) + NUM_LANES
    return at_query_weights(arguments, p_scratch) + 4 * size


@njit
def _num_pieces(arguments: int) -> Any:
    """Pieces of a state."""
    values = argument(arguments, places.NUM_VALUES) * argument(arguments, places.VALUE_DIM)
    return values // argument(arguments, places.COLUMNS)


@njit
def pieces_of(arguments: int, p_scratch: int, row: int, head: int) -> Any:
    """Addresses of the pieces of a row's states at its first and its last border: where they are
    written."""
    count = _num_pieces(arguments)
    p_first = _at_pieces(arguments, p_scratch)
    p_last = p_first + 8 * count
    rows.find_pieces(arguments, rows.FIRST, row, head, p_first, count)
    rows.find_pieces(arguments, rows.LAST, row, head, p_last, count)
    return p_first, p_last


@njit
def own_pieces(arguments: int, p_scratch: int) -> Any:
    """Addresses of the pieces of the scratch's state: where they are written."""
    count = _num_pieces(arguments)
    p_pieces = _at_pieces(arguments, p_scratch) + 16 * count
    size = argument(arguments, places.COLUMNS) * argument(arguments, places.KEY_DIM)
    rows.put_pieces(p_scratch, p_pieces, count, 4 * size)
    return p_pieces


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
