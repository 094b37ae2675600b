from __future__ import annotations

import pytest
import torch

from headwater.kernels.norm.silu_mul import (
    gelu_tanh_mul,
    gelu_tanh_mul_twin,
    rounded_mul,
    silu_mul,
    silu_mul_twin,
)
from headwater.kernels.quant.token_rounding import MOST, Rounding, round_tokens_twin
from tests.kernels.paging import GPU, POISON, relative_error

ROUNDINGS = [*map(Rounding, MOST), Rounding(torch.float8_e4m3fn, 128)]


@pytest.mark.parametrize(
    ("num_tokens", "width"), [(1, 64), (3, 1536), (2, 1111), pytest.param(129, 12288, marks=GPU)]
)
def test_silu_mul_agrees_with_float64(
    num_tokens: int, width: int, generator: torch.Generator
) -> None:
    x = (
        torch.randn(num_tokens, 2 * width, generator=generator, device=generator.device).bfloat16()
        * 3
    )
    out = silu_mul(x, x.new_full((num_tokens, width), POISON))
    assert relative_error(out, silu_mul_twin(x.double())) < 3e-3


@pytest.mark.parametrize(
    ("num_tokens", "width"), [(1, 64), (2, 1111), pytest.param(129, 6912, marks=GPU)]
)
def test_gelu_tanh_mul_agrees_with_float64(
    num_tokens: int, width: int, generator: torch.Generator
) -> None:
    x = torch.randn(num_tokens, 2 * width, generator=generator, device=generator.device).bfloat16()
    out = gelu_tanh_mul(x, x.new_full((num_tokens, width), POISON))
    assert relative_error(out, gelu_tanh_mul_twin(x.double())) < 3e-3


@pytest.mark.parametrize("rounds_to", ROUNDINGS, ids=str)
@pytest.mark.parametrize("is_gelu", [False, True])
@pytest.mark.parametrize(
    ("num_tokens", "width"),
    [(1, 64), (3, 1111), *(pytest.param(129, each, marks=GPU) for each in (12288, 25600))],
)
def test_a_rounded_gate_has_the_bits_of_the_gate_that_is_rounded(
    num_tokens: int, width: int, is_gelu: bool, rounds_to: Rounding, generator: torch.Generator
) -> None:
    width = -(-width // 128) * 128 if rounds_to.group else width
    x = torch.randn(num_tokens, 2 * width, generator=generator, device=generator.device).bfloat16()
    x[num_tokens // 2] *= 0.01
    found = rounded_mul(x, rounds_to, is_gelu=is_gelu)
    expected = round_tokens_twin((gelu_tanh_mul if is_gelu else silu_mul)(x), rounds_to)
    assert torch.equal(found.values.view(torch.uint8), expected.values.view(torch.uint8))
    assert torch.equal(found.scales, expected.scales)
