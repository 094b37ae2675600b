from __future__ import annotations

import pytest
import torch

from headwater.kernels.norm.rms_norm import (
    add_rms_norm,
    rms_norm,
    rms_norm_twin,
    rounded_add_rms_norm,
    rounded_rms_norm,
)
from headwater.kernels.quant.token_rounding import MOST, Rounding, round_tokens_twin
from tests.kernels.paging import GPU, POISON, relative_error

SHAPES = [
    (1, 64),
    (5, 576),
    (3, 1000),
    pytest.param(257, 4096, marks=GPU),
    pytest.param(64, 1024, marks=GPU),
]
ROUNDINGS = [*map(Rounding, MOST), Rounding(torch.float8_e4m3fn, 128)]
BOUND = 3e-3
"""Rounding to bfloat16 alone costs 1.7e-3."""


@pytest.mark.parametrize(("num_tokens", "hidden"), SHAPES)
def test_rms_norm_agrees_with_float64(
    num_tokens: int, hidden: int, generator: torch.Generator
) -> None:
    x = torch.randn(num_tokens, hidden, generator=generator, device=generator.device).bfloat16()
    weight = torch.rand(hidden, generator=generator, device=generator.device).bfloat16()
    out = rms_norm(x, weight, 1e-6, torch.full_like(x, POISON))
    assert relative_error(out, rms_norm_twin(x.double(), weight, 1e-6)) < BOUND


@pytest.mark.parametrize(("num_tokens", "hidden"), SHAPES)
def test_the_residual_is_added_rounded_and_kept(
    num_tokens: int, hidden: int, generator: torch.Generator
) -> None:
    x, residual = (
        torch.randn(num_tokens, hidden, generator=generator, device=generator.device).bfloat16()
        for _ in range(2)
    )
    weight = torch.rand(hidden, generator=generator, device=generator.device).bfloat16()
    expected = (x.float() + residual.float()).bfloat16()
    out = add_rms_norm(x, residual, weight, 1e-6, torch.full_like(x, POISON))
    assert torch.equal(residual, expected)
    assert relative_error(out, rms_norm_twin(expected.double(), weight, 1e-6)) < BOUND


@pytest.mark.parametrize(("num_tokens", "hidden"), SHAPES)
def test_a_row_has_the_same_bits_alone(
    num_tokens: int, hidden: int, generator: torch.Generator
) -> None:
    x = torch.randn(num_tokens, hidden, generator=generator, device=generator.device).bfloat16()
    weight = torch.rand(hidden, generator=generator, device=generator.device).bfloat16()
    assert torch.equal(rms_norm(x, weight, 1e-6)[-1:], rms_norm(x[-1:], weight, 1e-6))


@pytest.mark.parametrize("rounds_to", ROUNDINGS, ids=str)
@pytest.mark.parametrize(("num_tokens", "hidden"), SHAPES)
def test_a_rounded_norm_has_the_bits_of_the_norm_that_is_rounded(
    num_tokens: int, hidden: int, rounds_to: Rounding, generator: torch.Generator
) -> None:
    if rounds_to.group:
        hidden = -(-hidden // 128) * 128
    # On a GPU a norm whose sum has another order differs in one draw of six.
    for _ in range(50 if generator.device.type == "cuda" else 1):
        x, residual = (
            torch.randn(num_tokens, hidden, generator=generator, device=generator.device).bfloat16()
            for _ in range(2)
        )
        x[0] = 0
        weight = torch.rand(hidden, generator=generator, device=generator.device).bfloat16()
        kept = residual.clone()
        added = rounded_add_rms_norm(x, kept, weight, 1e-6, rounds_to)
        pairs = (
            (rounded_rms_norm(x, weight, 1e-6, rounds_to), rms_norm(x, weight, 1e-6)),
            (added, add_rms_norm(x, residual, weight, 1e-6)),
        )
        for found, norm in pairs:
            expected = round_tokens_twin(norm, rounds_to)
            assert torch.equal(found.values.view(torch.uint8), expected.values.view(torch.uint8))
            assert torch.equal(found.scales, expected.scales)
        assert torch.equal(kept, residual)
