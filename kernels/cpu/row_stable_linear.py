"""x @ weight.T on a CPU such that a row's bits do not depend on how many rows come with it.

Libraries choose a kernel by the number of rows, and few rows may be summed in another order than
many. Measured on a Zen 5 CPU with torch 2.13, 2026-11-21: bfloat16 products agree from 2 rows on (a
single row of 1,536 or more differs once in 6,000 results), float32 ones from 12 rows on, packed
float32 ones from 2. On a CPU that packs bfloat16 products of up to 100 and of 300 rows differed,
2026-11-24. `row_rule` finds the numbers of rows that agree for a machine and a shape: products of
fewer rows are padded, those of more are made of pieces. Where no two numbers agree, all pieces have
one number of rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.nn.functional import linear, pad

from . import packed_linear

CANDIDATES = (1, 2, 4, 8, 16, 32)
MAX_ROWS = 128
"""Rows of the largest product that a rule allows: larger ones are not probed."""
PROBED_ROWS = (*range(1, 18), 24, 31, 32, 33, 40, 48, 63, 64, 65, 80, 96, 100, 112, 127)
"""Numbers of rows that are compared with `MAX_ROWS`. Candidates are among them: on a CPU with AMX,
products of 31 and of 32 rows differ from those of 33 and more, 2026-11-29."""
MAX_WINDOWS = 4
"""Products that a probe makes of each number of rows."""
MAX_OUTPUTS = 2048
"""Outputs of a probe. Sums that cancel differ in many results or in none."""
FIXED_ROWS = 32
"""Rows of every piece where no two numbers of rows agree."""
LARGER_ROWS = (128, 160, 200, 256, 300, 384, 400, 500)
"""Like `PROBED_ROWS`, for rules that allow larger products."""


class Library(NamedTuple):
    """Library that multiplies weights and may prepare them first."""

    multiply: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    """Multiplies x [T, K] by a prepared weight [N, K]: [T, N]."""
    prepare: Callable[[torch.Tensor], torch.Tensor]
    """Converts weight [N, K] to what `multiply` reads."""


PLAIN = Library(linear, lambda weight: weight)
PACKED = Library(packed_linear.linear, packed_linear.pack)


class RowRule(NamedTuple):
    """Numbers of rows that a product may have."""

    min_rows: int
    max_rows: int = MAX_ROWS
    """`min_rows`, or at least twice as many, so that pieces of equal size are never too small."""


ONE_SIZE = RowRule(FIXED_ROWS, FIXED_ROWS)


def row_rule(
    num_outputs: int,
    num_inputs: int,
    dtype: torch.dtype,
    library: Library = PLAIN,
    *,
    max_rows: int = MAX_ROWS,
    fixed_rows: int = FIXED_ROWS,
) -> RowRule:
    """The rule that keeps a row's bits its own in products with weights [num_outputs, num_inputs]
    of up to `max_rows` rows. `fixed_rows`: rows of every product where no two numbers agree."""
    x, weight = cancelling_matrices(max_rows, min(num_outputs, MAX_OUTPUTS), num_inputs, dtype)
    weight = library.prepare(weight)
    expected = library.multiply(x, weight)
    probed = [rows for rows in (*PROBED_ROWS, *LARGER_ROWS) if rows < max_rows]
    unstable = (
        rows for rows in reversed(probed) if not _agrees(x, weight, rows, expected, library)
    )
    least = next(unstable, 0) + 1
    fixed = RowRule(fixed_rows, fixed_rows)
    return next((RowRule(rows, max_rows) for rows in CANDIDATES if rows >= least), fixed)


def cancelling_matrices(
    num_rows: int, num_outputs: int, num_inputs: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [num_rows, num_inputs] and weight [num_outputs, num_inputs] whose product is zero but for
    rounding.

    Every term has its negative among the inputs, at a random place, and terms differ widely in
    size. So a result is what the order of the sum makes of it: another order shows in most results,
    also when they are rounded to 16 bits.
    """
    generator = torch.Generator().manual_seed(0)
    half = num_inputs // 2
    places = torch.randperm(num_inputs, generator=generator)[: 2 * half]

    def halves(num: int) -> torch.Tensor:
        exponents = torch.randint(-4, 5, (num, half), generator=generator)
        return torch.ldexp(torch.randn(num, half, generator=generator), exponents).to(dtype)

    x = torch.zeros(num_rows, num_inputs, dtype=dtype)
    weight = torch.zeros(num_outputs, num_inputs, dtype=dtype)
    terms = halves(num_rows)
    factors = halves(num_outputs)
    x[:, places] = torch.cat([terms, terms], 1)
    weight[:, places] = torch.cat([factors, -factors], 1)
    return x, weight


def row_stable_linear(
    x: torch.Tensor, weight: torch.Tensor, rule: RowRule, library: Library = PLAIN
) -> torch.Tensor:
    """x [T, K] times weight [N, K] as the library prepared it: [T, N]."""
    if x.shape[0] <= rule.max_rows:
        return _padded(x, weight, rule.min_rows, library)
    if rule.min_rows == rule.max_rows:
        pieces = x.split(rule.max_rows)
    else:
        pieces = x.tensor_split(-(-x.shape[0] // rule.max_rows))
    return torch.cat([_padded(piece, weight, rule.min_rows, library) for piece in pieces])


def _padded(x: torch.Tensor, weight: torch.Tensor, min_rows: int, library: Library) -> torch.Tensor:
    if x.shape[0] >= min_rows:
        return library.multiply(x, weight)
    return library.multiply(pad(x, (0, 0, 0, min_rows - x.shape[0])), weight)[: x.shape[0]]


def _agrees(
    x: torch.Tensor, weight: torch.Tensor, num_rows: int, expected: torch.Tensor, library: Library
) -> bool:
    """Whether windows of `num_rows` rows give the bits that all rows together give."""
    starts = range(0, len(x) - num_rows + 1, num_rows)[:MAX_WINDOWS]
    windows = [slice(start, start + num_rows) for start in starts]
    return all(
        torch.equal(library.multiply(x[window], weight), expected[window]) for window in windows
    )
