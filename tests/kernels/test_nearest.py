from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from headwater.kernels.gemm.gemm import linear
from headwater.kernels.gemm.nearest import nearest
from tests.kernels.paging import GPU, relative_error

HALF = 2.0**-11
"""Half of the last bit that the matrix unit reads of numbers from 1 to 2."""


@triton.jit
def _round(p_x, p_out, BLOCK: tl.constexpr):
    o_i = tl.arange(0, BLOCK)
    tl.store(p_out + o_i, nearest(tl.load(p_x + o_i)))


def rounded(x: torch.Tensor) -> torch.Tensor:
    """`nearest` in plain torch."""
    return ((x.view(torch.int32) + (1 << 12)) & -(1 << 13)).view(torch.float32)


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (1 + HALF, 1 + 2 * HALF),
        (1 + 0.99 * HALF, 1.0),
        (-1 - HALF, -1 - 2 * HALF),
        (2 - HALF, 2.0),
        (0.0, 0.0),
        (float("inf"), float("inf")),
    ],
)
def test_float32_is_rounded_to_ten_bits_and_halves_go_away_from_zero(
    number: float, expected: float, generator: torch.Generator
) -> None:
    x = torch.full((16,), number, device=generator.device)
    out = torch.empty_like(x)
    _round[(1,)](x, out, BLOCK=16)
    assert out.tolist() == [expected] * 16
    assert torch.equal(out, rounded(x))


@GPU
@pytest.mark.parametrize("count", [1, 13, 40, 300])
def test_products_of_float32_are_those_of_rounded_numbers(
    count: int, generator: torch.Generator
) -> None:
    x, weight = (
        torch.randn(n, 576, generator=generator, device=generator.device) for n in (count, 192)
    )
    out = linear(x, weight, is_own=True)
    exact = x.double() @ weight.double().t()
    of_rounded = rounded(x).double() @ rounded(weight).double().t()
    assert relative_error(out, of_rounded) < 1e-5
    assert relative_error(out, exact) > 1e-5
