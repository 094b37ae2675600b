"""Arguments that kernels of state layers have in common, and where a row's units lie."""

from __future__ import annotations

from typing import Any

from numba import njit

from ...states.state_memory import StateMemory
from ..compiler.compiled import argument
from ..compiler.scalars import int32_at, size_of
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
UNITS_PER_PAGE = 9
UNIT_BYTES = 10
NUM_UNITS = 11
OWN = 12
"""Places of the arguments; a kernel's own ones begin with the last."""


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
        memory.units_per_page,
        memory.unit_bytes,
        num_units,
    )


@njit
def unit_of(arguments: int, table: int, row: int, unit: int) -> Any:
    """Address of a row's unit, by the page ids of argument `table`."""
    number = argument(arguments, FIRST_UNIT) + unit
    per_page = argument(arguments, UNITS_PER_PAGE)
    at = row * argument(arguments, NUM_PAGES) + number // per_page
    page = int32_at(argument(arguments, table) + 4 * at)
    p_page = argument(arguments, PAGES) + page * argument(arguments, PAGE_BYTES)
    return p_page + number % per_page * argument(arguments, UNIT_BYTES)


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
