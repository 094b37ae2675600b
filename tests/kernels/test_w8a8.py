from __future__ import annotations

import pytest
import torch

from headwater.kernels.gemm import hopper_w8a8_rows
from headwater.kernels.gemm.hopper_w8a8_gemm import w8a8_gemm
from headwater.kernels.gemm.w8a8 import W8A8Weight, fits, signed_in_place, w8a8_linear, w8a8_twin
from headwater.kernels.quant.byte_weights import Fp8Weight, Int8Weight, expand
from headwater.kernels.quant.token_rounding import MOST, Rounding, round_tokens, round_tokens_twin
from tests.kernels.paging import GPU, POISON, relative_error

FP8 = Rounding(torch.float8_e4m3fn)
INT8 = Rounding(torch.int8)
BLOCKS = Rounding(torch.float8_e4m3fn, 128)
ROUNDINGS = [FP8, INT8, BLOCKS]
ROWS = (1, 2, 8, 9, 16, 17, 32, 64, 65, 128, 129, 200, 256, 400, 520)
SHAPES = [(4096, 4096), (6144, 4112), (4096, 12288), (10240, 4096), (1168, 896), (16, 16)]
"""[N, K]; some are whole in no number of tiles."""


def made(rounding: Rounding, n: int, k: int, generator: torch.Generator) -> W8A8Weight:
    """In blocks, of inputs rounded up to whole ones."""
    k = -(-k // 128) * 128 if rounding.group else k
    numbers = torch.randn(n, k, generator=generator, device=generator.device)
    shape = (-(-n // 64), k // 128) if rounding.group else (n,)
    scales = torch.rand(shape, generator=generator, device=generator.device) * 1e-2 + 1e-3
    if rounding.dtype == torch.int8:
        return W8A8Weight(
            values=(numbers * 30).round().clamp(-127, 127).to(rounding.dtype), scales=scales / 30
        )
    return W8A8Weight(values=numbers.to(rounding.dtype), scales=scales)


def of_inputs(weight: W8A8Weight) -> torch.Tensor:
    """The weight's numbers in float64 [N, K]."""
    scales = weight.scales.double()
    if scales.ndim == 2:
        scales = scales.repeat_interleave(64, dim=0)[: weight.shape[0]].repeat_interleave(
            128, dim=1
        )
    else:
        scales = scales[:, None]
    return weight.values.double() * scales


def rows_of(m: int, k: int, generator: torch.Generator) -> torch.Tensor:
    """Rows whose sizes differ, with one of zeros and one that is nearly that."""
    x = torch.randn(m, k, generator=generator, device=generator.device)
    x *= 10 ** (4 * torch.rand(m, 1, generator=generator, device=generator.device) - 2)
    if m > 3:
        x[2], x[3] = 0, x[3] * 1e-35
    return x.bfloat16()


@pytest.mark.parametrize(
    ("m", "k", "rounding"),
    [
        (m, k, rounding)
        for m, k in ((1, 128), (5, 640), (9, 1024), (9, 1000), (1, 16))
        for rounding in ROUNDINGS
        if not rounding.group or k % rounding.group == 0
    ],
    ids=str,
)
def test_tokens_are_rounded_as_specified_to_the_bit(
    m: int, k: int, rounding: Rounding, generator: torch.Generator
) -> None:
    x = rows_of(m, k, generator)
    values, scales = round_tokens(x, rounding)
    expected, expected_scales = round_tokens_twin(x, rounding)
    assert values.dtype == rounding.dtype
    assert scales.shape == ((k // rounding.group, m) if rounding.group else (m,))
    assert torch.equal(values.view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(scales, expected_scales)


@pytest.mark.parametrize("rounding", ROUNDINGS, ids=str)
def test_a_token_is_rounded_to_within_half_a_step(
    rounding: Rounding, generator: torch.Generator
) -> None:
    x = rows_of(7, 384, generator)
    size = rounding.group or 384
    values, scales = round_tokens_twin(x, rounding)
    scales = scales.view(-1, 7).t().repeat_interleave(size, dim=1)
    most = x.float().abs().unflatten(1, (-1, size)).amax(2)
    # e4m3 numbers have three bits behind the first; integers lie a scale apart.
    step = scales if rounding == INT8 else (x.float().abs() / 8).clamp(min=2**-9 * scales)
    error = (values.float() * scales - x.float()).abs()
    # What is nearly nothing becomes zeros.
    assert bool((error <= step * 0.501 + 1e-30).all())
    largest = values.float().abs().unflatten(1, (-1, size)).amax(2)
    assert torch.equal(
        largest[most > 1e-30], torch.full_like(most, MOST[rounding.dtype])[most > 1e-30]
    )


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


def test_weights_of_other_groups_or_unaligned_rows_do_not_fit() -> None:
    def fp8(n: int, k: int, groups: int) -> Fp8Weight:
        return Fp8Weight(
            values=torch.zeros(n, k).to(torch.float8_e4m3fn), scales=torch.ones(groups, n)
        )

    assert fits(fp8(32, 64, 1))
    assert fits(fp8(32, 256, 2))
    assert not fits(fp8(32, 256, 4))
    assert not fits(fp8(32, 64, 2))
    # Blocks of 64 outputs are of one expert.
    assert fits(fp8(256, 256, 2), 4)
    assert not fits(fp8(192, 256, 2), 4)
    assert fits(fp8(192, 256, 1), 4)
    assert not fits(fp8(40, 64, 1))
    assert not fits(fp8(32, 72, 1))
    zeros = torch.full((1, 32), 127, dtype=torch.uint8)
    assert not fits(
        Int8Weight(
            values=torch.zeros(32, 64, dtype=torch.uint8), scales=torch.ones(1, 32), zeros=zeros
        )
    )


@pytest.mark.parametrize(("num_outputs", "size"), [(256, 128), (192, 64), (208, 128), (64, 128)])
def test_scales_of_blocks_are_kept_for_64_outputs(
    num_outputs: int, size: int, generator: torch.Generator
) -> None:
    blocks = torch.rand(3, -(-num_outputs // size), generator=generator, device=generator.device)
    scales = blocks.repeat_interleave(size, dim=1)[:, :num_outputs].contiguous()
    values = torch.randn(num_outputs, 384, generator=generator, device=generator.device).to(
        torch.float8_e4m3fn
    )
    weight = Fp8Weight(values=values, scales=scales, rounds_tokens=True)
    assert fits(weight)
    kept = signed_in_place(weight)
    assert kept.values.data_ptr() == values.data_ptr()
    assert kept.rounding == BLOCKS
    assert torch.equal(of_inputs(kept).float(), expand(weight, torch.float32))
    assert all(tiles.block_n % 64 == 0 for tiles in kept.team_tiles)
    scales[1, 33] *= 2
    assert not fits(weight)


@pytest.mark.parametrize("rounding", ROUNDINGS, ids=str)
@pytest.mark.parametrize("fault", ["row's scale", "output's scale", "order"])
def test_a_fault_shows(fault: str, rounding: Rounding, generator: torch.Generator) -> None:
    weight = made(rounding, 256, 256, generator)
    x = torch.randn(4, 256, generator=generator, device=generator.device)
    exact = x.double() @ of_inputs(weight).t()
    assert relative_error(w8a8_twin(x, weight), exact) < 0.04
    if fault == "row's scale":
        x[1] *= 1.3
    elif fault == "output's scale":
        weight.scales[3::4] *= 1.5
    else:
        numbers = weight.values.view(torch.uint8)
        numbers[:, :16] = numbers[:, :16].flip(1)
    assert relative_error(w8a8_twin(x, weight), exact) > 0.06


@GPU
@pytest.mark.parametrize("rounding", ROUNDINGS, ids=str)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_a_row_has_the_same_bits_beside_any_others(
    n: int, k: int, rounding: Rounding, generator: torch.Generator
) -> None:
    weight = made(rounding, n, k, generator)
    x = rows_of(max(ROWS), weight.shape[1], generator)
    whole = w8a8_linear(x, weight)
    twin = w8a8_twin(x, weight)
    if rounding == INT8:
        assert torch.equal(whole, twin)
    else:
        assert relative_error(whole, twin.double()) < 2e-3
    for m in ROWS:
        for dependent in (False, True):
            assert torch.equal(w8a8_linear(x[:m], weight, dependent=dependent), whole[:m]), (
                m,
                dependent,
            )
        assert torch.equal(w8a8_linear(x[-m:].clone(), weight), whole[-m:]), m


@GPU
@pytest.mark.parametrize("rounding", ROUNDINGS, ids=str)
@pytest.mark.parametrize("m", [1, 5, 64, 130, 300])
def test_all_tiles_have_the_same_bits(
    m: int, rounding: Rounding, generator: torch.Generator
) -> None:
    weight = made(rounding, 4112, 2064, generator)
    x = rows_of(m, weight.shape[1], generator)
    values, scales = round_tokens(x, rounding)
    expected = w8a8_linear(x, weight)
    for tiles in weight.team_tiles:
        out = x.new_full((m, 4112), POISON)
        w8a8_gemm(values, scales, weight.values, weight.scales, out, tiles, num_programs=7)
        assert torch.equal(out, expected), tiles
    for rows in (*hopper_w8a8_rows.TILES.values(), *hopper_w8a8_rows.CROWDED_TILES.values()):
        out = x.new_full((m, 4112), POISON)
        hopper_w8a8_rows.w8a8_rows(values, scales, weight.values, weight.scales, out, rows)
        assert torch.equal(out, expected), rows
