"""Weights of the tokens of whole rows of logits on a CPU, in sums that no order changes: see
`weight_sums`."""

from __future__ import annotations

from typing import Any

import torch
from llvmlite import ir
from numba import njit
from numba.extending import intrinsic
from torch.nn.functional import pad

from ..sampling.weight_sums import ONE
from .compiler.compiled import Kernel, argument, items
from .compiler.scalars import float32_at, put_int64, size_of
from .compiler.simd import choose_below, div, load, mul, splat, sub
from .compiler.simd_math import exp
from .compiler.simd_types import BF16_ELEMENT, F32, F32_ELEMENT, I64, INT, LANES, LONG, NUM_LANES


def row_weights(
    logits: torch.Tensor, highests: torch.Tensor, temperatures: torch.Tensor, leasts: torch.Tensor
) -> torch.Tensor:
    """Sums int64 [R] of exp((logit − highest) / temperature), as whole numbers of 1 / ONE, over the
    logits of each row [R, N], float32 or bfloat16, that are at least `leasts`; those and the others
    are float32 [R]."""
    width = -(-logits.shape[1] // NUM_LANES) * NUM_LANES
    logits = pad(logits, (0, width - logits.shape[1]), value=-torch.inf).contiguous()
    totals = torch.empty(len(logits), dtype=torch.int64)
    bounds = torch.stack((highests, temperatures, leasts), dim=1)
    KERNEL(
        logits.dtype,
        len(logits),
        4 * logits.numel(),
        logits.data_ptr(),
        bounds.data_ptr(),
        totals.data_ptr(),
        width,
    )
    return totals


@intrinsic
def _whole_sum(typing: Any, x: Any) -> Any:
    """The sum of the lanes, each rounded down to a whole number."""

    def generate(_: Any, builder: ir.IRBuilder, __: Any, a: list[Any]) -> Any:
        whole = builder.fptosi(a[0], ir.VectorType(LONG, NUM_LANES))
        total = ir.Constant(LONG, 0)
        for lane in range(NUM_LANES):
            total = builder.add(total, builder.extract_element(whole, ir.Constant(INT, lane)))
        return total

    return I64(LANES), generate


@njit
def _row(arguments: int, i: int, element: Any) -> None:
    width = argument(arguments, 3)
    p_bounds = argument(arguments, 1) + i * 12
    p_logits = argument(arguments, 0) + i * width * size_of(element)
    highest = splat(float32_at(p_bounds))
    temperature = splat(float32_at(p_bounds + 4))
    least = splat(float32_at(p_bounds + 8))
    zero = splat(F32(0))
    one = splat(F32(ONE))
    total = 0
    for at in range(0, width, NUM_LANES):
        x = load(p_logits + at * size_of(element), element)
        weight = mul(exp(div(sub(x, highest), temperature)), one)
        total += _whole_sum(choose_below(x, least, zero, weight))
    put_int64(argument(arguments, 2) + i * 8, total)


def _rows(element: Any) -> Any:
    def work(arguments: int) -> None:
        for i in items(arguments):
            _row(arguments, i, element)

    return work


KERNEL = Kernel(_rows(F32_ELEMENT), _rows(BF16_ELEMENT))
