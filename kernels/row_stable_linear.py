"""x @ weight.T on a CPU such that a row's bits do not depend on how many rows come with it.

Libraries choose a kernel by the number of rows, and few rows may be summed in another order than many. Measured on a
Zen 5 CPU with torch 2.13, 2026-11-21: bfloat16 products agree from 2 rows on (a single row of 1,536 or more differs
once in 6,000 results), float32 ones from 12 rows on, packed float32 ones from 2. `row_rule` finds the bound for a
machine and a shape: products of fewer rows are padded up to it. Where there is none, every product is made of pieces of
one number of rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.nn.functional import linear, pad

from . import packed_linear

CANDIDATES = (1, 2, 4, 8, 16, 32)
PROBED_ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 15, 16, 17, 24, 31, 33, 48, 64, 100)
NUM_ROWS, NUM_OUTPUTS = 128, 2048
"""Size of a probe. Bits that differ rarely need many results to show."""
FIXED_ROWS = 32


class Library(NamedTuple):
    """Library that multiplies weights and may prepare them first."""

    multiply: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    """Multiplies x [T, K] by a prepared weight [N, K]: [T, N]."""
    prepare: Callable[[torch.Tensor], torch.Tensor]
    """Converts weight [N, K] to what `multiply` reads."""


PLAIN = Library(linear, lambda weight: weight)
PACKED = Library(packed_linear.linear, packed_linear.pack)


class RowRule(NamedTuple):
    """Numbers of rows that a product may have: at least `num_rows`, or, where `is_exact`, exactly that many."""

    num_rows: int
    is_exact: bool = False


def row_rule(num_outputs: int, num_inputs: int, dtype: torch.dtype, library: Library = PLAIN) -> RowRule:
    """The rule that keeps a row's bits its own in products with weights [num_outputs, num_inputs]."""
    num_outputs = min(num_outputs, NUM_OUTPUTS)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(NUM_ROWS, num_inputs, generator=generator).to(dtype)
    weight = library.prepare(torch.randn(num_outputs, num_inputs, generator=generator).to(dtype))
    expected = library.multiply(x, weight)
    unstable = [rows for rows in PROBED_ROWS if not _agrees(x, weight, rows, expected, library)]
    least = max(unstable, default=0) + 1
    return next((RowRule(rows) for rows in CANDIDATES if rows >= least), RowRule(FIXED_ROWS, is_exact=True))


def row_stable_linear(x: torch.Tensor, weight: torch.Tensor, rule: RowRule, library: Library = PLAIN) -> torch.Tensor:
    """x [T, K] times weight [N, K] as the library prepared it: [T, N]."""
    if rule.is_exact:
        return torch.cat([_padded(part, weight, rule.num_rows, library) for part in x.split(rule.num_rows)])
    return library.multiply(x, weight) if x.shape[0] >= rule.num_rows else _padded(x, weight, rule.num_rows, library)


def _padded(x: torch.Tensor, weight: torch.Tensor, num_rows: int, library: Library) -> torch.Tensor:
    return library.multiply(pad(x, (0, 0, 0, num_rows - x.shape[0])), weight)[: x.shape[0]]


def _agrees(x: torch.Tensor, weight: torch.Tensor, num_rows: int, expected: torch.Tensor, library: Library) -> bool:
    """Whether every window of `num_rows` rows gives the bits that all rows together give."""
    windows = zip(x.split(num_rows), expected.split(num_rows), strict=True)
    return all(
        torch.equal(library.multiply(window, weight), part) for window, part in windows if len(window) == num_rows
    )
