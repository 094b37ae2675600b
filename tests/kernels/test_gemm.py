from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from headwater.kernels.attention.hopper_attention import is_hopper
from headwater.kernels.gemm.gated_gemm import gated_gemm
from headwater.kernels.gemm.gemm import (
    EARLY_BYTES,
    GATED,
    HALF_TILES,
    RING_TILES,
    ROW_TILES,
    SHORT_RING_TILES,
    TILES,
    Tiles,
    choose,
    choose_ring,
    choose_rows,
    configure_blas,
    linear,
    linear_pair,
    linear_silu_mul,
    linear_twin,
    skinny_gated_gemm,
    skinny_gemm,
    tile_inputs,
)
from headwater.kernels.gemm.hopper_few_rows_gemm import FewRowTiles, few_rows_gemm
from headwater.kernels.gemm.hopper_ring_gemm import RingTiles, ring_gemm
from headwater.kernels.gemm.hopper_ring_gemm import serves as serves_ring
from headwater.kernels.gemm.hopper_rows_gemm import RowTiles, rows_gemm
from headwater.kernels.norm.rms_norm import rms_norm
from headwater.kernels.norm.silu_mul import silu_mul, silu_mul_twin
from tests.kernels.paging import GPU, POISON, relative_error

ALL_TILES = [*TILES.values(), HALF_TILES]
SHARED_BYTES = 227 << 10
"""Shared memory of a program on Hopper."""
LINEARS = [
    (6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288), (151936, 4096),
    (4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072), (151936, 1024),
]  # fmt: skip
"""[N, K] of the products of Qwen3-8B and Qwen3-0.6B."""


@pytest.mark.parametrize("tiles", ALL_TILES, ids=str)
@pytest.mark.parametrize(
    ("m", "n", "k"),
    [(1, 96, 256), (3, 70, 576), (13, 64, 100), pytest.param(61, 4100, 4096, marks=GPU)],
)
def test_skinny_gemm_agrees_with_float64(
    m: int, n: int, k: int, tiles: Tiles, generator: torch.Generator
) -> None:
    x, weight = (
        torch.randn(s, k, generator=generator, device=generator.device).bfloat16() for s in (m, n)
    )
    out = x.new_full((m, n), POISON)
    skinny_gemm(x, weight, out, tiles)
    assert relative_error(out, linear_twin(x.double(), weight.double())) < 3e-3


@pytest.mark.parametrize("tiles", ALL_TILES, ids=str)
@pytest.mark.parametrize(
    ("m", "n", "k"), [(1, 96, 512), (13, 64, 100), pytest.param(32, 2048, 4096, marks=GPU)]
)
def test_a_product_of_four_byte_weights_agrees_with_float64(
    m: int, n: int, k: int, tiles: Tiles, generator: torch.Generator
) -> None:
    x, weight = (torch.randn(s, k, generator=generator, device=generator.device) for s in (m, n))
    skinny_gemm(x, weight, out := x.new_full((m, n), POISON), tiles)
    # Inputs of the matrix unit have ten bits of fraction.
    assert relative_error(out, linear_twin(x.double(), weight.double())) < 2e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("tiles", [*ALL_TILES, GATED], ids=str)
def test_tiles_fit_in_shared_memory_for_any_number_of_inputs(
    tiles: Tiles, dtype: torch.dtype
) -> None:
    columns = tiles.block_n * (2 if tiles is GATED else 1)
    for k in (100, 576, 2048, 4096):
        block_k = tile_inputs(torch.empty(1, k, dtype=dtype), tiles)
        assert k % block_k == 0 or k == 100
        assert (
            tiles.block_m + columns
        ) * block_k * dtype.itemsize * tiles.num_stages <= SHARED_BYTES


@GPU
@pytest.mark.parametrize(("n", "k"), LINEARS)
def test_every_batch_size_gives_a_row_the_same_bits(
    n: int, k: int, generator: torch.Generator
) -> None:
    configure_blas()
    weight = torch.randn(n, k, generator=generator, device=generator.device).bfloat16()
    x = torch.randn(2048, k, generator=generator, device=generator.device).bfloat16()
    alone = torch.cat([linear(x[i : i + 1], weight) for i in range(8)])
    for m in (
        2,
        7,
        8,
        9,
        16,
        17,
        31,
        32,
        33,
        48,
        63,
        64,
        65,
        96,
        128,
        129,
        160,
        192,
        193,
        255,
        256,
        300,
        512,
        1000,
        2048,
    ):
        at = {0, 1, m // 2, m - 1}
        rolled = x[:m].clone()
        for i, place in enumerate(at):
            rolled[place] = x[i]
        out = linear(rolled, weight)
        assert all(torch.equal(out[place], alone[i]) for i, place in enumerate(at)), m


@pytest.mark.parametrize(
    ("m", "n", "k"), [(1, 96, 256), (13, 64, 100), pytest.param(16, 4096, 4096, marks=GPU)]
)
def test_skinny_gated_gemm_agrees_with_float64(
    m: int, n: int, k: int, generator: torch.Generator
) -> None:
    x, weight = (
        torch.randn(s, k, generator=generator, device=generator.device).bfloat16()
        for s in (m, 2 * n)
    )
    out = x.new_full((m, n), POISON)
    skinny_gated_gemm(x, weight * k**-0.5, out)
    # The product is rounded before it is gated, as one that is stored.
    assert (
        relative_error(out, silu_mul_twin(linear_twin(x.double(), (weight * k**-0.5).double())))
        < 6e-3
    )


@pytest.mark.parametrize(
    ("m", "n", "k"), [(300, 256, 128), pytest.param(8192, 12288, 4096, marks=GPU)]
)
def test_gated_gemm_agrees_with_float64(m: int, n: int, k: int, generator: torch.Generator) -> None:
    x, weight = (
        torch.randn(s, k, generator=generator, device=generator.device).bfloat16()
        for s in (m, 2 * n)
    )
    out = x.new_full((m, n), POISON)
    gated_gemm(x, weight * k**-0.5, out)
    product = linear_twin(x.double(), (weight * k**-0.5).double())
    assert relative_error(out, silu_mul_twin(product)) < 6e-3


@GPU
@pytest.mark.parametrize(("n", "k"), [(12288, 4096), (3072, 1024)])
def test_a_row_is_gated_to_the_same_bits_in_every_batch(
    n: int, k: int, generator: torch.Generator
) -> None:
    configure_blas()
    weight = (
        torch.randn(2 * n, k, generator=generator, device=generator.device).bfloat16() * k**-0.5
    )
    x = torch.randn(3000, k, generator=generator, device=generator.device).bfloat16()
    together = silu_mul(linear(x, weight))
    for m in (1, 2, 8, 9, 16, 17, 64, 100, 128, 192, 200, 256, 1024, 1500, 2048, 3000):
        assert torch.equal(linear_silu_mul(x[:m], weight), together[:m]), m


@GPU
@pytest.mark.parametrize(("key", "tiles"), ROW_TILES.items(), ids=str)
@pytest.mark.parametrize(
    ("m", "n", "k"), [(9, 128, 256), (64, 6144, 1024), (100, 4096, 1024), (256, 1024, 3072)]
)
def test_rows_gemm_has_the_bits_of_the_library(
    key: tuple[int, str], tiles: RowTiles, m: int, n: int, k: int, generator: torch.Generator
) -> None:
    if not is_hopper(generator.device):
        pytest.skip("for Hopper")
    configure_blas()
    gates = key[1] == "gates"
    x, weight = (
        torch.randn(s, k, generator=generator, device=generator.device).bfloat16() for s in (m, n)
    )
    product = torch.mm(x, weight.t())
    expected = silu_mul(product) if gates else product
    for dependent in (False, True):
        out = torch.full_like(expected, POISON)
        rows_gemm(x, weight, out, tiles, gates=gates, dependent=dependent)
        assert torch.equal(out, expected)


@GPU
@pytest.mark.parametrize(
    ("n", "k", "block_n", "gates"),
    [
        *((128, 256, block_n, gates) for block_n in (8, 16, 32) for gates in (False, True)),
        *((4096, 1024, block_n, gates) for block_n in (8, 16, 32) for gates in (False, True)),
        (1024, 2048, 16, False),
        (1024, 3072, 8, False),
        (32, 2880, 8, False),
    ],
)
def test_few_rows_gemm_has_the_bits_of_the_library(
    n: int, k: int, block_n: int, gates: bool, generator: torch.Generator
) -> None:
    if not is_hopper(generator.device):
        pytest.skip("for Hopper")
    configure_blas()
    tiles = FewRowTiles(block_n)
    rows, weight = (
        torch.randn(s, k, generator=generator, device=generator.device).bfloat16() for s in (16, n)
    )
    together = torch.mm(rows, weight.t())
    for m in (1, 2, 3, 7, 8, 9, 15, 16):
        expected = silu_mul(together[:m]) if gates else together[:m]
        for dependent in (False, True):
            out = torch.full_like(expected, POISON)
            few_rows_gemm(rows[:m], weight, out, tiles, gates=gates, dependent=dependent)
            assert torch.equal(out, expected), m


@GPU
@pytest.mark.parametrize(
    ("n", "k", "tiles"),
    [
        (768, 2048, RING_TILES),
        (768, 2048, RingTiles(64, 0, 4, 110 << 10)),
        (768, 2880, replace(RING_TILES, at_once=5)),
        (12288, 2048, RING_TILES),
        (2048, 4096, SHORT_RING_TILES),
    ],
)
def test_ring_gemm_has_the_bits_of_the_library(
    n: int, k: int, tiles: RingTiles, generator: torch.Generator
) -> None:
    if not is_hopper(generator.device):
        pytest.skip("for Hopper")
    configure_blas()
    rows, weight, second = (
        torch.randn(s, k, generator=generator, device=generator.device).bfloat16()
        for s in (16, n, 64)
    )
    expected, of_second = (torch.mm(rows, each.t()) for each in (weight, second))
    for m in (1, 2, 7, 8, 9, 16):
        if not serves_ring(rows[:m], weight, tiles):
            continue
        for dependent in (False, True):
            out, second_out = (torch.full_like(each[:m], POISON) for each in (expected, of_second))
            ring_gemm(rows[:m], weight, out, tiles, dependent=dependent)
            assert torch.equal(out, expected[:m]), m
            ring_gemm(
                *(rows[:m], weight, out.fill_(POISON), tiles),
                second=second,
                second_out=second_out,
                dependent=dependent,
            )
            assert torch.equal(out, expected[:m]), m
            assert torch.equal(second_out, of_second[:m]), m


@pytest.mark.parametrize("m", [1, 5, 40])
@pytest.mark.parametrize(("n", "k"), [(96, 128), pytest.param(12288, 2048, marks=GPU)])
def test_a_pair_of_products_has_the_bits_of_two(
    n: int, k: int, m: int, generator: torch.Generator
) -> None:
    x, weight, second = (
        torch.randn(s, k, generator=generator, device=generator.device).bfloat16()
        for s in (m, n, 64)
    )
    expected = linear(x, weight), linear(x, second)
    for found, product in zip(linear_pair(x, weight, second), expected, strict=True):
        assert torch.equal(found, product)


def test_rings_are_for_few_rows_of_large_weights_on_a_hopper(device: torch.device) -> None:
    def tiles(m: int, n: int, k: int) -> RingTiles | None:
        x, weight = (torch.empty(s, k, dtype=torch.bfloat16, device=device) for s in (m, n))
        return choose_ring(x, weight)

    first = RING_TILES if is_hopper(device) else None
    assert tiles(1, 12288, 2048) == tiles(16, 9216, 2048) == first
    assert (tiles(1, 2048, 4096) == SHORT_RING_TILES) == is_hopper(device)
    assert not any((tiles(17, 12288, 2048), tiles(1, 4096, 2048), tiles(1, 6144, 4096)))


@GPU
@pytest.mark.parametrize("gates", [False, True])
def test_rows_beside_others_change_no_bit_of_a_row(gates: bool, generator: torch.Generator) -> None:
    """Not even where shared memory holds no numbers: the matrix unit reads more rows than there
    are."""
    if not is_hopper(generator.device):
        pytest.skip("for Hopper")
    weight = torch.randn(4096, 1024, generator=generator, device=generator.device).bfloat16()
    rows = torch.randn(8, 1024, generator=generator, device=generator.device).bfloat16()
    out = rows.new_empty(8, 2048 if gates else 4096)
    few_rows_gemm(rows, weight, out, FewRowTiles(32), gates=gates, dependent=False)
    few_rows_gemm(
        rows * torch.nan,
        weight,
        torch.empty_like(out),
        FewRowTiles(32),
        gates=gates,
        dependent=False,
    )
    for i in range(8):
        alone = torch.full_like(out[:1], POISON)
        few_rows_gemm(rows[i : i + 1], weight, alone, FewRowTiles(32), gates=gates, dependent=False)
        assert torch.equal(alone, out[i : i + 1])


@GPU
@pytest.mark.parametrize("m", [1, 2, 8, 16, 32, 64, 128, 192, 256])
def test_products_that_start_early_wait_for_one_another(m: int, generator: torch.Generator) -> None:
    configure_blas()
    up, back = (
        torch.randn(s, generator=generator, device=generator.device)
        for s in ((6144, 1024), (1024, 3072))
    )
    up = up.bfloat16()
    back = back.bfloat16()
    scale = torch.full((1024,), 0.03, device=generator.device).bfloat16()
    x = torch.randn(m, 1024, generator=generator, device=generator.device).bfloat16()

    def chain(x: torch.Tensor, *, dependent: bool) -> torch.Tensor:
        for _ in range(100):
            x = rms_norm(x, scale, 1e-6, dependent=dependent)
            x = linear(linear_silu_mul(x, up, dependent=dependent), back, dependent=dependent)
        return x

    alone = chain(x, dependent=False)
    assert bool(alone.isfinite().all())
    assert all(torch.equal(chain(x, dependent=True), alone) for _ in range(5))


def test_tiles_of_hopper_are_for_a_hopper_and_small_weights(device: torch.device) -> None:
    def chosen(m: int, n: int, k: int, *, gates: bool = False) -> bool:
        x, weight = (torch.empty(s, k, dtype=torch.bfloat16, device=device) for s in (m, n))
        return choose_rows(x, weight, gates=gates) is not None

    here = is_hopper(device)
    assert (
        chosen(17, 1024, 2048)
        == chosen(256, 4096, 1024)
        == chosen(9, 6144, 1024, gates=True)
        == here
    )
    assert not any(chosen(m, 1024, 2048) for m in (1, 16, 257))
    assert not chosen(160, 6144, 1024, gates=True)
    assert not chosen(64, EARLY_BYTES // 2048 + 128, 1024)
    assert not chosen(64, 1024, 576)


@pytest.mark.parametrize("m", [40, 100])
def test_products_of_our_own_never_reach_the_library(
    m: int, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise AssertionError("the library was asked")

    monkeypatch.setattr(torch, "mm", refuse)
    x, weight = (
        torch.randn(s, 576, generator=generator, device=generator.device).bfloat16()
        for s in (m, 160)
    )
    weight *= 576**-0.5
    with pytest.raises(AssertionError, match="the library"):
        linear(x, weight)
    product = linear_twin(x.double(), weight.double())
    assert relative_error(linear(x, weight, is_own=True), product) < 3e-3
    assert relative_error(linear_silu_mul(x, weight, is_own=True), silu_mul_twin(product)) < 6e-3


@pytest.mark.long
def test_only_the_warning_that_a_setting_is_experimental_is_left_out() -> None:
    program = """
import os, sys, torch
from headwater.kernels.gemm.gemm import configure_blas
prefer = torch.backends.cuda.preferred_blas_library
def prefer_and_say_more(name):
    print("before", file=sys.stderr)
    prefer(name if torch.backends.cuda.is_built() else "ck")
    os.write(2, b"after\\n")
torch.backends.cuda.preferred_blas_library = prefer_and_say_more
if "quiet" in sys.argv:
    configure_blas()
else:
    prefer_and_say_more("cublaslt")
print("later", file=sys.stderr)
"""

    def says(*args: str) -> list[str]:
        command = [sys.executable, "-c", program, *args]
        return subprocess.run(
            command, capture_output=True, text=True, check=True
        ).stderr.splitlines()

    loud = says()
    quiet = says("quiet")
    assert any("experimental feature" in line for line in loud)
    assert not any("experimental feature" in line for line in quiet)
    # A machine's libraries may say something of their own.
    assert [line for line in quiet if line in ("before", "after", "later")] == [
        "before",
        "after",
        "later",
    ]


def test_inputs_that_are_no_whole_tiles_have_more_stages_of_half_as_many() -> None:
    assert choose(1, 5120, 2880) == choose(16, 32, 2880) == HALF_TILES
    assert choose(17, 5120, 2880) == TILES[32, "between"]
    assert choose(1, 5120, 4096) == choose(1, 5120, 100) == TILES[16, "between"]
    assert choose(1, 1024, 2880) == TILES[16, "short"]
