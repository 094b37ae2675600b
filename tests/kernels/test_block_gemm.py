from __future__ import annotations

from typing import Any

import pytest
import torch

from headwater.kernels.gemm import block_gemm as block_gemm_kernels
from headwater.kernels.gemm import hopper_block_gemm
from headwater.kernels.gemm.block_gemm import (
    block_gemm,
    block_linear,
    expanded,
    launch_all_tiles,
    rows_of,
)
from headwater.kernels.gemm.gemm import configure_blas, linear, linear_twin
from headwater.kernels.gemm.int4_gemm import MOST_ROWS, TILES, Int4Tiles
from headwater.kernels.quant.block_formats import (
    FORMATS,
    Q4_0,
    Q4_K,
    Q5_0,
    Q6_K,
    Q8_0,
    BlockFormat,
    pack,
)
from headwater.kernels.quant.block_planes import BlockPlanes, expand, expand_rows, planes_of
from tests.kernels.paging import (
    GPU,
    LONG,
    LONG_INTERPRETED,
    POISON,
    relative_error,
    shapes_by_type,
)
from tests.kernels.random_blocks import random_rows
from tests.kernels.test_int4_gemm import rows

EVERY = list(FORMATS.values())


def _marks(format: BlockFormat, dtype: torch.dtype) -> Any:
    return (
        ()
        if dtype == torch.bfloat16 or (format is Q5_0 and dtype == torch.float32)
        else LONG_INTERPRETED
    )


EXPANDED = [
    pytest.param(format, dtype, id=f"{format.name}-{dtype}", marks=_marks(format, dtype))
    for format in EVERY
    for dtype in (torch.bfloat16, torch.float16, torch.float32)
]
"""Only the last step, a cast, differs between types: `make test` interprets one of them for all
formats."""
ROWS = (1, 2, 8, 16, 17, 33, 64, 100, 129, 200, MOST_ROWS, 300, 1024)
SHAPES = [(4096, 4096), (6144, 4096), (4096, 12288), (1003, 768), (576, 1536)]
"""[N, K]; the last ones are whole in no number of large tiles."""


def made(format: BlockFormat, n: int, k: int, generator: torch.Generator) -> BlockPlanes:
    weight = pack(random_rows(format, n, k, seed=generator.initial_seed() % (1 << 32)), format)
    return planes_of(
        type(weight)(format=format, tiles=weight.tiles.to(generator.device), num_rows=n)
    )


def matrix(parts: list[BlockPlanes], dtype: torch.dtype) -> torch.Tensor:
    return torch.cat([expand(part, dtype) for part in parts])


@pytest.mark.parametrize(("format", "dtype"), EXPANDED)
def test_an_expanded_matrix_and_its_rows_have_the_bits_of_their_specification(
    format: BlockFormat, dtype: torch.dtype, generator: torch.Generator
) -> None:
    for n, k in ((40, format.unit), (33, 3 * format.unit)):
        planes = made(format, n, k, generator)
        assert torch.equal(expanded([planes], dtype), expand(planes, dtype))
        for count in (1, 19):
            ids = torch.randint(n, (count,), generator=generator, device=generator.device)
            assert torch.equal(rows_of(planes, ids, dtype), expand_rows(planes, ids, dtype))
    assert rows_of(planes, ids[:0], dtype).shape == (0, k)


@pytest.mark.parametrize(
    "tiles", [TILES[16], *(pytest.param(TILES[m], marks=LONG_INTERPRETED) for m in TILES)], ids=str
)
@pytest.mark.parametrize("format", EVERY, ids=lambda format: format.name)
@pytest.mark.parametrize(
    ("m", "n", "k"),
    [(3, 70, 768), pytest.param(40, 72, 512, marks=LONG), pytest.param(61, 4104, 4096, marks=GPU)],
)
def test_block_gemm_agrees_with_float64(
    m: int, n: int, k: int, format: BlockFormat, tiles: Int4Tiles, generator: torch.Generator
) -> None:
    weight = made(format, n, k, generator)
    x = rows(m, k, generator)
    whole = x.new_full((m + 1, n + 9), POISON)
    block_gemm(x, weight, whole[:m, 5 : n + 5], tiles)
    assert bool(
        (whole[m] == POISON).all()
        & (whole[:, :5] == POISON).all()
        & (whole[:, n + 5 :] == POISON).all()
    )
    assert (
        relative_error(
            whole[:m, 5 : n + 5], linear_twin(x.double(), matrix([weight], torch.bfloat16).double())
        )
        < 3e-3
    )


@pytest.mark.parametrize("k", [32, 96, 160])
@pytest.mark.parametrize(
    "format", [each for each in EVERY if not each.is_nested], ids=lambda format: format.name
)
def test_inputs_that_are_whole_in_no_wide_tile_are_multiplied(
    format: BlockFormat, k: int, generator: torch.Generator
) -> None:
    weight = made(format, 24, k, generator)
    x = rows(2, k, generator)
    assert (
        relative_error(
            block_linear(x, [weight]), linear_twin(x.double(), expand(weight, x.dtype).double())
        )
        < 3e-3
    )


@pytest.mark.parametrize("m", [2, MOST_ROWS + 1])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_parts_of_several_formats_stand_side_by_side(
    m: int, dtype: torch.dtype, generator: torch.Generator
) -> None:
    parts = [made(format, n, 256, generator) for format, n in ((Q4_K, 40), (Q6_K, 17), (Q8_0, 7))]
    x = rows(m, 256, generator, dtype)
    out = block_linear(x, parts)
    assert (out.shape, out.dtype) == ((m, 64), dtype)
    assert relative_error(out, linear_twin(x.double(), matrix(parts, dtype).double())) < 3e-3


def test_a_matrix_that_is_too_large_for_scratch_memory_is_multiplied_in_pieces(
    monkeypatch: pytest.MonkeyPatch, generator: torch.Generator
) -> None:
    parts = [made(Q4_K, 24, 256, generator)]
    x = rows(2 * MOST_ROWS + 3, 256, generator)
    expected = linear_twin(x.double(), matrix(parts, x.dtype).double())
    monkeypatch.setattr(block_gemm_kernels, "MOST_SCRATCH", 0)
    monkeypatch.setattr(block_gemm_kernels, "expanded", None)
    assert relative_error(block_linear(x, parts), expected) < 3e-3


@pytest.mark.parametrize("fault", ["words", "high", "scales", "factors"])
def test_a_fault_of_one_plane_shows(fault: str, generator: torch.Generator) -> None:
    format = next(each for each in EVERY if each.name == ("q6_k" if fault == "factors" else "q5_k"))
    weight = made(format, 64, 512, generator)
    x = rows(4, 512, generator)
    reference = linear_twin(x.double(), expand(weight, torch.bfloat16).double())
    plane = getattr(weight, fault)
    plane.copy_(plane.flip(0 if fault == "words" else 2))
    assert relative_error(block_linear(x, [weight]), reference) > 1e-2


@GPU
@pytest.mark.parametrize(("shapes", "dtype"), shapes_by_type(SHAPES, {(6144, 4096), (1003, 768)}))
@pytest.mark.parametrize("format", EVERY, ids=lambda format: format.name)
def test_every_number_of_rows_has_the_bits_of_the_expanded_matrix(
    shapes: list[tuple[int, int]],
    format: BlockFormat,
    dtype: torch.dtype,
    generator: torch.Generator,
) -> None:
    configure_blas()
    for n, k in shapes:
        weight = made(format, n, k, generator)
        x = rows(max(ROWS), k, generator, dtype)
        whole = expand(weight, dtype)
        assert torch.equal(expanded([weight], dtype), whole), (n, k)
        for m in ROWS:
            expected = linear(x[:m], whole, is_own=True)
            for dependent in (False, True):
                found = block_linear(x[:m], [weight], dependent=dependent)
                assert torch.equal(found, expected), (n, k, m, dependent)


@GPU
@pytest.mark.parametrize("m", [1, 7, 64, 300])
def test_parts_have_the_bits_of_one_expanded_matrix(m: int, generator: torch.Generator) -> None:
    configure_blas()
    parts = [
        made(format, n, 4096, generator)
        for format, n in ((Q4_K, 4096), (Q6_K, 1024), (Q5_0, 1000), (Q4_0, 24))
    ]
    x = rows(m, 4096, generator)
    assert torch.equal(block_linear(x, parts), linear(x, matrix(parts, x.dtype), is_own=True))


@GPU
@pytest.mark.parametrize("format", EVERY, ids=lambda format: format.name)
@pytest.mark.parametrize("m", [1, 5, 16, 100, 256])
def test_all_tiles_have_the_same_bits(
    m: int, format: BlockFormat, generator: torch.Generator
) -> None:
    configure_blas()
    weight = made(format, 4104, 4096, generator)
    x = rows(m, 4096, generator)
    expected = linear(x, expand(weight, torch.bfloat16), is_own=True)
    for tiles in TILES.values():
        block_gemm(x, weight, out := x.new_full((m, 4104), POISON), tiles)
        assert torch.equal(out, expected), tiles


def num_compiled() -> int:
    """Number of products that are compiled, of both kernels."""
    kernels = block_gemm_kernels._block_gemm, hopper_block_gemm._hopper_block_gemm
    return sum(len(caches[0]) for kernel in kernels for caches in kernel.device_caches.values())


@GPU
def test_after_all_tiles_were_launched_no_product_compiles_a_kernel(
    generator: torch.Generator,
) -> None:
    parts = [made(format, n, 512, generator) for format, n in ((Q4_K, 48), (Q8_0, 16))]
    launch_all_tiles(parts, torch.bfloat16, 256)
    known = num_compiled()
    for m in (1, 3, 8, 16, 24, 50, 65, 128, 256, 512):
        block_linear(rows(m, 512, generator), parts, dependent=m <= 256)
    assert num_compiled() == known > 0
