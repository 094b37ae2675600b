from __future__ import annotations

import pytest
import torch

from headwater.kernels import hopper_w8a8_rows
from headwater.kernels.byte_weights import Fp8Weight, Int8Weight
from headwater.kernels.hopper_w8a8_gemm import w8a8_gemm
from headwater.kernels.token_rounding import MOST, round_tokens, round_tokens_twin
from headwater.kernels.w8a8 import (
    TEAM_TILES,
    W8A8Weight,
    fits,
    signed_in_place,
    w8a8_linear,
    w8a8_twin,
)
from tests.kernels.paging import GPU, POISON, relative_error

DTYPES = [torch.float8_e4m3fn, torch.int8]
ROWS = (1, 2, 8, 9, 16, 17, 32, 64, 65, 128, 129, 200, 256, 400, 520)
SHAPES = [(4096, 4096), (6144, 4112), (4096, 12288), (1168, 896), (16, 16)]
"""[N, K]; some are whole in no number of tiles."""


def made(dtype: torch.dtype, n: int, k: int, generator: torch.Generator) -> W8A8Weight:
    numbers = torch.randn(n, k, generator=generator, device=generator.device)
    scales = torch.rand(n, generator=generator, device=generator.device) * 1e-2 + 1e-3
    if dtype == torch.int8:
        return W8A8Weight(values=(numbers * 30).round().clamp(-127, 127).to(dtype), scales=scales / 30)
    return W8A8Weight(values=numbers.to(dtype), scales=scales)


def rows_of(m: int, k: int, generator: torch.Generator) -> torch.Tensor:
    """Rows whose sizes differ, with one of zeros and one that is nearly that."""
    x = torch.randn(m, k, generator=generator, device=generator.device)
    x *= 10 ** (4 * torch.rand(m, 1, generator=generator, device=generator.device) - 2)
    if m > 3:
        x[2], x[3] = 0, x[3] * 1e-35
    return x.bfloat16()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("m", "k"), [(1, 16), (5, 576), (9, 1000)])
def test_tokens_are_rounded_as_specified_to_the_bit(
    m: int, k: int, dtype: torch.dtype, generator: torch.Generator
) -> None:
    x = rows_of(m, k, generator)
    values, scales = round_tokens(x, dtype)
    expected, expected_scales = round_tokens_twin(x, dtype)
    assert values.dtype == dtype
    assert torch.equal(values.view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(scales, expected_scales)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_token_is_rounded_to_within_half_a_step(dtype: torch.dtype, generator: torch.Generator) -> None:
    x = rows_of(7, 320, generator)
    values, scales = round_tokens_twin(x, dtype)
    most = x.float().abs().amax(1)
    # e4m3 numbers have three bits behind the first; integers lie a scale apart.
    step = scales[:, None] if dtype == torch.int8 else (x.float().abs() / 8).clamp(min=2**-9 * scales[:, None])
    error = (values.float() * scales[:, None] - x.float()).abs()
    # What is nearly nothing becomes zeros.
    assert bool((error <= step * 0.501 + 1e-30).all())
    assert torch.equal(values.float().abs().amax(1)[most > 1e-30], torch.full_like(most, MOST[dtype])[most > 1e-30])


def test_integers_keep_their_values_without_their_middle(generator: torch.Generator) -> None:
    values = torch.arange(256, dtype=torch.uint8, device=generator.device).repeat(16, 1)
    zeros = torch.full((1, 16), 128, dtype=torch.uint8, device=generator.device)
    scales = torch.rand(1, 16, generator=generator, device=generator.device).bfloat16()
    weight = Int8Weight(values=values, scales=scales, zeros=zeros, rounds_tokens=True)
    assert fits(weight)
    signed = signed_in_place(weight)
    assert signed.values.data_ptr() == values.data_ptr()
    assert signed.values[0].tolist() == list(range(-128, 128))
    assert torch.equal(signed.scales, scales[0].float())


def test_weights_of_several_scales_or_unaligned_rows_do_not_fit() -> None:
    def fp8(n: int, k: int, groups: int) -> Fp8Weight:
        return Fp8Weight(values=torch.zeros(n, k).to(torch.float8_e4m3fn), scales=torch.ones(groups, n))

    assert fits(fp8(32, 64, 1))
    assert not fits(fp8(32, 64, 2))
    assert not fits(fp8(40, 64, 1))
    assert not fits(fp8(32, 72, 1))
    zeros = torch.full((1, 32), 127, dtype=torch.uint8)
    assert not fits(Int8Weight(values=torch.zeros(32, 64, dtype=torch.uint8), scales=torch.ones(1, 32), zeros=zeros))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fault", ["row's scale", "output's scale", "order"])
def test_a_fault_shows(fault: str, dtype: torch.dtype, generator: torch.Generator) -> None:
    weight, x = made(dtype, 64, 128, generator), torch.randn(4, 128, generator=generator, device=generator.device)
    exact = x.double() @ (weight.values.double() * weight.scales.double()[:, None]).t()
    assert relative_error(w8a8_twin(x, weight), exact) < 0.04
    if fault == "row's scale":
        x[1] *= 1.3
    elif fault == "output's scale":
        weight.scales[3::4] *= 1.3
    else:
        numbers = weight.values.view(torch.uint8)
        numbers[:, :8] = numbers[:, :8].flip(1)
    assert relative_error(w8a8_twin(x, weight), exact) > 0.06


@GPU
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_a_row_has_the_same_bits_beside_any_others(
    n: int, k: int, dtype: torch.dtype, generator: torch.Generator
) -> None:
    weight, x = made(dtype, n, k, generator), rows_of(max(ROWS), k, generator)
    whole, twin = w8a8_linear(x, weight), w8a8_twin(x, weight)
    if dtype == torch.int8:
        assert torch.equal(whole, twin)
    else:
        assert relative_error(whole, twin.double()) < 2e-3
    for m in ROWS:
        for dependent in (False, True):
            assert torch.equal(w8a8_linear(x[:m], weight, dependent=dependent), whole[:m]), (m, dependent)
        assert torch.equal(w8a8_linear(x[-m:].clone(), weight), whole[-m:]), m


@GPU
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("m", [1, 5, 64, 130, 300])
def test_all_tiles_have_the_same_bits(m: int, dtype: torch.dtype, generator: torch.Generator) -> None:
    weight, x = made(dtype, 4112, 2064, generator), rows_of(m, 2064, generator)
    values, scales = round_tokens(x, dtype)
    expected = w8a8_linear(x, weight)
    for tiles in TEAM_TILES:
        out = x.new_full((m, 4112), POISON)
        w8a8_gemm(values, scales, weight.values, weight.scales, out, tiles, num_programs=7)
        assert torch.equal(out, expected), tiles
    for rows in (*hopper_w8a8_rows.TILES.values(), *hopper_w8a8_rows.CROWDED_TILES.values()):
        out = x.new_full((m, 4112), POISON)
        hopper_w8a8_rows.w8a8_rows(values, scales, weight.values, weight.scales, out, rows)
        assert torch.equal(out, expected), rows
