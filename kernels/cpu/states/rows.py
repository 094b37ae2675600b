"""Arguments that kernels of state layers have in common, and where a row's units lie."""

from __future__ import annotations

from typing import Any

from numba import njit

from ...states.state_memory import StateMemory
from ..compiler.compiled import argument
from ..compiler.scalars import int32_at, int64_at, put_int64, size_of
from ..compiler.simd import load, store
from ..compiler.simd_types import NUM_LANES

PAGES = 0
PAGE_BYTES = 1
FIRST = 2
LAST = 3
NUM_PAGES = 4
STARTS = 5
ENDS = 6
TOKENS = 7
FIRST_UNIT = 8
TAILS_PER_PAGE = 9
TAIL_BYTES = 10
NUM_BEHIND = 11
PIECES_BEHIND = 12
PIECES_AT = 13
NUM_TAIL_PAGES = 14
PIECES_PER_PAGE = 15
PIECE_BYTES = 16
NUM_UNITS = 17
OWN = 18
"""Indices of a kernel's arguments; those that only one kernel has begin with `OWN`."""


def row_arguments(memory: StateMemory, num_units: int) -> tuple[int, ...]:
    """The arguments before a kernel's own ones."""
    return (
        memory.pages.data_ptr(),
        memory.pages.stride(0),
        memory.first.data_ptr(),
        memory.last.data_ptr(),
        memory.first.shape[1],
        memory.starts.data_ptr(),
        memory.ends.data_ptr(),
        memory.tokens.data_ptr(),
        memory.first_unit,
        memory.layout.tails_per_page,
        memory.layout.tail_bytes,
        *memory.layout.of_pieces,
        num_units,
    )


@njit
def _page_of(arguments: int, table: int, row: int, number: int) -> Any:
    """Address of a page of a row's set, by the page ids of argument `table`."""
    at = row * argument(arguments, NUM_PAGES) + number
    page = int32_at(argument(arguments, table) + 4 * at)
    return argument(arguments, PAGES) + page * argument(arguments, PAGE_BYTES)


@njit
def tail_of(arguments: int, table: int, row: int, unit: int) -> Any:
    """Address of the tail of a unit of a row's set."""
    number = argument(arguments, FIRST_UNIT) + unit
    per_page = argument(arguments, TAILS_PER_PAGE)
    p_page = _page_of(arguments, table, row, number // per_page)
    return p_page + number % per_page * argument(arguments, TAIL_BYTES)


@njit
def find_pieces(
    arguments: int, table: int, row: int, unit: int, p_pieces: int, num_pieces: int
) -> None:
    """Writes the addresses of the pieces of a unit's state in a row's set, int64 [num_pieces]."""
    first = (argument(arguments, FIRST_UNIT) + unit) * num_pieces
    num_behind = argument(arguments, NUM_BEHIND)
    piece_bytes = argument(arguments, PIECE_BYTES)
    for i in range(num_pieces):
        number = first + i
        if number < num_behind:
            per_page = argument(arguments, PIECES_BEHIND)
            page = number // per_page
            at = argument(arguments, PIECES_AT) + number % per_page * piece_bytes
        else:
            per_page = argument(arguments, PIECES_PER_PAGE)
            page = argument(arguments, NUM_TAIL_PAGES) + (number - num_behind) // per_page
            at = (number - num_behind) % per_page * piece_bytes
        put_int64(p_pieces + 8 * i, _page_of(arguments, table, row, page) + at)


@njit
def column_of(p_pieces: int, column: int, columns: int) -> Any:
    """Address of a column of a state in its first row; `columns` of a piece, whose addresses are at
    `p_pieces`."""
    return int64_at(p_pieces + 8 * (column // columns)) + 4 * (column % columns)


@njit
def put_pieces(p_state: int, p_pieces: int, num_pieces: int, piece_bytes: int) -> None:
    """Writes the addresses of the pieces of a contiguous state."""
    for i in range(num_pieces):
        put_int64(p_pieces + 8 * i, p_state + i * piece_bytes)


@njit
def number_of(arguments: int, table: int, row: int) -> Any:
    """A row's number in argument `table`: `STARTS`, `ENDS` or `TOKENS`."""
    return int32_at(argument(arguments, table) + 4 * row)


@njit
def copy(p_from: int, p_to: int, count: int, element: Any) -> None:
    """Copies elements; count is a multiple of `NUM_LANES`."""
    for d in range(0, count, NUM_LANES):
        at = d * size_of(element)
        store(p_to + at, load(p_from + at, element), element)
