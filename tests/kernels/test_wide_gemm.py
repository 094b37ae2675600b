from __future__ import annotations

import pytest
import torch

from headwater.kernels.attention.hopper_attention import is_hopper
from headwater.kernels.gemm.gemm import TILES as SKINNY_TILES
from headwater.kernels.gemm.gemm import linear_twin, skinny_gemm
from headwater.kernels.gemm.hopper_wide_gemm import hopper_wide_gemm
from headwater.kernels.gemm.wide_gemm import wide_gemm
from headwater.kernels.gemm.wide_tiles import (
    SHARED_BYTES,
    TEAM_TILES,
    TILES,
    TeamTiles,
    WideTiles,
    choose_wide,
    fitting_tiles,
)
from tests.kernels.paging import GPU, LONG, LONG_INTERPRETED, POISON, relative_error

ODD_SHAPES = [
    (33, 576, 576),
    (64, 960, 576),
    (100, 576, 1536),
    (129, 640, 640),
    (300, 896, 1152),
    (515, 1152, 2112),
]
"""[M, N, K] that divide by nothing convenient."""
UNALIGNED_SHAPES = [(40, 70, 100), (65, 131, 77), (70, 96, 130)]
"""Shapes whose rows do not begin at multiples of 16 bytes."""
NUM_MULTIPROCESSORS = 132


def random(
    generator: torch.Generator, *shape: int, dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    return torch.randn(shape, generator=generator, device=generator.device).to(dtype)


def chosen(
    m: int, n: int, k: int, dtype: torch.dtype = torch.bfloat16, *, has_teams: bool = True
) -> WideTiles | TeamTiles:
    return choose_wide(m, n, k, dtype, NUM_MULTIPROCESSORS, has_teams=has_teams)


def skip_without_hopper(tiles: WideTiles | TeamTiles, device: torch.device) -> None:
    if isinstance(tiles, TeamTiles) and not is_hopper(device):
        pytest.skip("teams multiply on Hopper alone")


def product(
    x: torch.Tensor, weight: torch.Tensor, tiles: WideTiles | TeamTiles | None = None
) -> torch.Tensor:
    """Part of a wider matrix, so that writes beyond the product show."""
    m = x.shape[0]
    n = weight.shape[0]
    whole = x.new_full((m + 1, n), POISON)
    wide_gemm(x, weight, whole[:m], tiles)
    assert bool((whole[m] == POISON).all())
    return whole[:m]


@pytest.mark.parametrize("tiles", TILES, ids=str)
@pytest.mark.parametrize(
    ("m", "n", "k"),
    [
        (33, 72, 136),
        pytest.param(200, 264, 576, marks=LONG),
        (131, 648, 200),
        pytest.param(8192, 6144, 4096, marks=GPU),
    ],
)
def test_wide_gemm_agrees_with_float64(
    m: int, n: int, k: int, tiles: WideTiles, generator: torch.Generator
) -> None:
    x = random(generator, m, k)
    weight = random(generator, n, k)
    assert (
        relative_error(product(x, weight, tiles), linear_twin(x.double(), weight.double())) < 3e-3
    )


@pytest.mark.parametrize(
    "dtype",
    [torch.bfloat16, pytest.param(torch.float16, marks=LONG_INTERPRETED), torch.float32],
    ids=str,
)
@pytest.mark.parametrize(("m", "n", "k"), [*ODD_SHAPES[:4], *UNALIGNED_SHAPES])
def test_shapes_of_no_whole_tiles_agree_with_float64(
    m: int, n: int, k: int, dtype: torch.dtype, generator: torch.Generator
) -> None:
    x = random(generator, m, k, dtype=dtype)
    weight = random(generator, n, k, dtype=dtype)
    assert relative_error(product(x, weight), linear_twin(x.double(), weight.double())) < 3e-3


def test_rows_of_wider_matrices_are_read_and_written_where_they_lie(
    generator: torch.Generator,
) -> None:
    x = random(generator, 50, 200)[:, 3:131]
    weight = random(generator, 80, 200)[:, 8:136]
    out = torch.zeros(50, 90)
    out = out.to(x).fill_(POISON)
    wide_gemm(x, weight, out[:, 5:85])
    assert relative_error(out[:, 5:85], linear_twin(x.double(), weight.double())) < 3e-3
    assert bool((out[:, :5] == POISON).all() & (out[:, 85:] == POISON).all())


@GPU
@pytest.mark.parametrize("tiles", [*TILES, *TEAM_TILES], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("m", "n", "k"), [*ODD_SHAPES, *UNALIGNED_SHAPES, (2048, 4096, 12288), (9000, 1024, 2048)]
)
def test_every_row_has_the_bits_of_a_skinny_product(
    m: int,
    n: int,
    k: int,
    dtype: torch.dtype,
    tiles: WideTiles | TeamTiles,
    generator: torch.Generator,
) -> None:
    skip_without_hopper(tiles, generator.device)
    x = random(generator, m, k, dtype=dtype)
    weight = random(generator, n, k, dtype=dtype)
    expected = torch.full((m, n), POISON, dtype=dtype, device=x.device)
    for rows, part in zip(x.split(16), expected.split(16), strict=True):
        skinny_gemm(rows, weight, part, SKINNY_TILES[16, "between"])
    assert torch.equal(product(x, weight, tiles), expected)


@GPU
@pytest.mark.parametrize(
    ("n", "k"), [(576, 576), (960, 576), (3072, 576), (576, 1536), (49_152, 576), (6144, 4096)]
)
def test_a_row_has_the_same_bits_in_products_of_any_number_of_rows(
    n: int, k: int, generator: torch.Generator
) -> None:
    x = random(generator, 3000, k)
    weight = random(generator, n, k)
    together = product(x, weight)
    for m in (1, 17, 33, 63, 64, 65, 127, 129, 200, 255, 256, 257, 511, 777, 1000, 2047, 2049):
        for start in (0, 1, 7, 3000 - m):
            assert torch.equal(
                product(x[start : start + m], weight), together[start : start + m]
            ), (m, start)


@GPU
@pytest.mark.parametrize("tiles", TEAM_TILES, ids=str)
@pytest.mark.parametrize(("n", "k"), [(576, 576), (960, 576), (648, 200), (72, 136), (3072, 1536)])
def test_teams_write_the_same_bits_each_time_and_nothing_beyond(
    n: int, k: int, tiles: TeamTiles, generator: torch.Generator
) -> None:
    """Few programs fill their rings many times over, and both teams store while the copies of later
    tiles arrive."""
    skip_without_hopper(tiles, generator.device)
    weight = random(generator, n, k)
    for m in (1, 17, 64, 257, 2048, 8191):
        x = random(generator, m, k)
        expected = product(x, weight, TILES[0])
        for num_programs in (3, NUM_MULTIPROCESSORS):
            for _ in range(5):
                whole = x.new_full((m + 1, n), POISON)
                hopper_wide_gemm(x, weight, whole[:m], tiles, num_programs=num_programs)
                assert torch.equal(whole[:m], expected), (m, num_programs)
                assert bool((whole[m] == POISON).all())


@GPU
@pytest.mark.parametrize("tiles", TEAM_TILES, ids=str)
def test_teams_wait_for_a_product_that_is_their_input(
    tiles: TeamTiles, generator: torch.Generator
) -> None:
    """Each product starts while the one before it ends, and overwrites what that one reads."""
    skip_without_hopper(tiles, generator.device)
    weights = [random(generator, 576, 576) / 24 for _ in range(20)]
    for m in (64, 300, 2048):
        x = random(generator, m, 576)
        expected = x
        for weight in weights:
            expected = product(expected, weight, TILES[0])
        here = x.clone()
        there = torch.empty_like(x)
        for weight in weights:
            hopper_wide_gemm(here, weight, there, tiles, num_programs=NUM_MULTIPROCESSORS)
            here, there = there, here
        assert torch.equal(here, expected), m


def test_few_rows_take_small_tiles_and_many_large_ones() -> None:
    assert chosen(64, 1024, 2048) == WideTiles(64, 32, 8, 0.25, block_k=128)
    assert chosen(64, 576, 576) == TeamTiles(64, 64, 12, 0.43, 1)
    assert chosen(8192, 4096, 4096) == chosen(2048, 24_576, 4096) == TeamTiles(128, 256, 4, 0.96, 2)


def test_widths_between_powers_of_two_keep_all_multiprocessors_at_work() -> None:
    assert chosen(256, 6144, 4096).block_n == 192
    assert chosen(2048, 576, 1536).block_n == 144
    assert chosen(8192, 576, 1536).block_n == 288


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_teams_multiply_elements_of_two_bytes_on_hopper_alone(dtype: torch.dtype) -> None:
    shapes = [(m, n, k) for m in (64, 256, 2048, 8192) for n, k in ((576, 576), (4096, 4096))]
    assert not any(
        isinstance(chosen(*shape, dtype, has_teams=False), TeamTiles) for shape in shapes
    )
    has_two_bytes = dtype.itemsize == 2
    assert any(isinstance(chosen(*shape, dtype), TeamTiles) for shape in shapes) == has_two_bytes
    assert (TEAM_TILES[0] in fitting_tiles(dtype, has_teams=True)) == has_two_bytes


def test_tiles_fit_into_the_shared_memory_of_a_hopper() -> None:
    assert fitting_tiles(torch.bfloat16, has_teams=False) == TILES
    assert fitting_tiles(torch.float32, has_teams=False) == TILES[1:]
    for tiles in TILES:
        stages = tiles.num_stages * (tiles.block_m + tiles.block_n) * tiles.block_k * 2
        assert max(stages, tiles.block_m * tiles.block_n * 2) < SHARED_BYTES == 227 << 10


def test_rings_of_teams_fit_into_the_shared_memory_of_a_hopper() -> None:
    assert all(tiles.shared_bytes() <= SHARED_BYTES for tiles in TEAM_TILES)
    # Four stages of 128 + 288 rows, and of either team two places of 64 x 32.
    assert (
        TeamTiles(128, 288, 4, 1.0, 2, chunk=32).shared_bytes()
        == 4 * 416 * 128 + 4 * 64 * 32 * 2 + 512
    )
    # Columns narrower than a chunk have places of their own.
    assert (
        TeamTiles(64, 144, 8, 1.0, 1, chunk=32).shared_bytes()
        == 8 * 208 * 128 + 64 * (2 * 32 + 16) * 2 + 512
    )
