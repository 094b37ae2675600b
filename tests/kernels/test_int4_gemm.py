from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from headwater.kernels.gemm.gemm import configure_blas, linear, linear_twin
from headwater.kernels.gemm.hopper_packed_gemm import hopper_packed_gemm
from headwater.kernels.gemm.int4_gemm import (
    MOST_ROWS,
    TILES,
    Int4Tiles,
    choose,
    expanded,
    int4_gemm,
    int4_linear,
)
from headwater.kernels.gemm.packed_tiles import RingTiles, tiles_of
from headwater.kernels.gemm.packed_words import PackedWords
from headwater.kernels.quant.int4_layout import Int4Weight, expand, pack, zero_points
from tests.kernels.paging import (
    GPU,
    LONG,
    LONG_INTERPRETED,
    POISON,
    relative_error,
    shapes_by_type,
)
from tests.kernels.test_int4_layout import random_weight

ROWS = (1, 2, 8, 16, 17, 64, 100, 200, MOST_ROWS, 400, 1024, 2048, 2304)
SHAPES = [(8192, 8192), (6144, 4096), (4096, 12288), (1152, 896), (576, 1536)]
"""[N, K]; the last ones are whole in no number of large tiles."""
ALL_TILES = list(TILES.values())
ORDERS_AND_TILES = [
    pytest.param(
        in_order,
        tiles,
        id=f"{in_order}-{tiles}",
        marks=() if in_order or i == 0 else LONG_INTERPRETED,
    )
    for in_order in (True, False)
    for i, tiles in enumerate(ALL_TILES)
]
"""All tiles look scales up in the same way where inputs are not in their groups' order: one of them
is interpreted."""


def made(
    n: int,
    k: int,
    group_size: int,
    generator: torch.Generator,
    *,
    in_order: bool = True,
    scale_dtype: torch.dtype = torch.float16,
    symmetric: bool = False,
) -> Int4Weight:
    num_groups = k // (k if group_size == -1 else group_size)
    weights, scales, zeros = random_weight(n, k, num_groups, generator, scale_dtype)
    of_inputs = torch.arange(k, device=generator.device) // (k // num_groups)
    shuffled = of_inputs[torch.randperm(k, generator=generator, device=generator.device)].int()
    groups = None if in_order else shuffled
    return Int4Weight(
        words=pack(weights), scales=scales, zeros=None if symmetric else zeros, groups=groups
    )


def rows(
    m: int, k: int, generator: torch.Generator, dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    return torch.randn(m, k, generator=generator, device=generator.device).to(dtype)


@pytest.mark.parametrize(
    "dtype",
    [torch.bfloat16, pytest.param(torch.float16, marks=LONG_INTERPRETED), torch.float32],
    ids=str,
)
@pytest.mark.parametrize("scale_dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize(
    ("n", "k", "group_size"),
    [
        pytest.param(40, 128, 32, marks=LONG),
        (33, 256, 64),
        pytest.param(70, 256, 128, marks=LONG),
        (64, 96, -1),
    ],
)
def test_an_expanded_matrix_has_the_bits_of_its_specification(
    n: int,
    k: int,
    group_size: int,
    in_order: bool,
    symmetric: bool,
    scale_dtype: torch.dtype,
    dtype: torch.dtype,
    generator: torch.Generator,
) -> None:
    options = {"in_order": in_order, "symmetric": symmetric}
    weight = made(n, k, group_size, generator, scale_dtype=scale_dtype, **options)
    assert torch.equal(expanded(weight, dtype), expand(weight, dtype))


@pytest.mark.parametrize(("in_order", "tiles"), ORDERS_AND_TILES)
@pytest.mark.parametrize(
    ("m", "n", "k", "group_size"),
    [
        pytest.param(1, 96, 256, 64, marks=LONG_INTERPRETED),
        (3, 70, 576, 32),
        pytest.param(13, 64, 160, 32, marks=LONG),
        pytest.param(40, 72, 512, 128, marks=LONG),
        (130, 40, 192, -1),
        pytest.param(61, 4104, 4096, 128, marks=GPU),
    ],
)
def test_int4_gemm_agrees_with_float64(
    m: int,
    n: int,
    k: int,
    group_size: int,
    in_order: bool,
    tiles: Int4Tiles,
    generator: torch.Generator,
) -> None:
    weight = made(n, k, group_size, generator, in_order=in_order)
    x = rows(m, k, generator)
    whole = x.new_full((m + 1, n), POISON)
    int4_gemm(x, weight, whole[:m], tiles)
    assert bool((whole[m] == POISON).all())
    assert (
        relative_error(whole[:m], linear_twin(x.double(), expand(weight, torch.bfloat16).double()))
        < 3e-3
    )


def test_symmetric_weights_are_multiplied_as_those_with_zero_points(
    generator: torch.Generator,
) -> None:
    weight = made(64, 256, 64, generator, symmetric=True)
    x = rows(3, 256, generator)
    found = int4_linear(x, weight)
    assert torch.equal(found, int4_linear(x, replace(weight, zeros=zero_points(weight))))
    assert (
        relative_error(found, linear_twin(x.double(), expand(weight, torch.bfloat16).double()))
        < 3e-3
    )


@pytest.mark.parametrize("m", [2, MOST_ROWS + 1])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_every_type_and_number_of_rows_is_served(
    m: int, dtype: torch.dtype, generator: torch.Generator
) -> None:
    weight = made(64, 128, 32, generator)
    x = rows(m, 128, generator, dtype)
    out = int4_linear(x, weight)
    assert out.dtype == dtype
    assert relative_error(out, linear_twin(x.double(), expand(weight, dtype).double())) < 3e-3


@pytest.mark.parametrize("fault", ["scale", "zero", "order", "group"])
def test_a_fault_of_one_group_shows(fault: str, generator: torch.Generator) -> None:
    weight = made(64, 256, 64, generator, in_order=False)
    x = rows(4, 256, generator)
    reference = linear_twin(x.double(), expand(weight, torch.bfloat16).double())
    assert weight.groups is not None
    assert weight.zeros is not None
    if fault == "scale":
        weight.scales[1] *= 1.2
    elif fault == "zero":
        weight.zeros[1] ^= 1
    elif fault == "order":
        weight.words[:, :4] = weight.words[:, :4].flip(1)
    else:
        weight.groups[:] = weight.groups.flip(0)
    assert relative_error(int4_linear(x, weight), reference) > 1e-2


@GPU
@pytest.mark.parametrize(("shapes", "dtype"), shapes_by_type(SHAPES, {(6144, 4096), (1152, 896)}))
@pytest.mark.parametrize(
    ("group_size", "in_order", "symmetric"),
    [
        *itertools.product((32, 64, 128, -1), (True, False), (False,)),
        (128, True, True),
        (32, False, True),
    ],
)
def test_every_number_of_rows_has_the_bits_of_the_expanded_matrix(
    shapes: list[tuple[int, int]],
    group_size: int,
    in_order: bool,
    symmetric: bool,
    dtype: torch.dtype,
    generator: torch.Generator,
) -> None:
    configure_blas()
    for n, k in shapes:
        weight = made(n, k, group_size, generator, in_order=in_order, symmetric=symmetric)
        x = rows(max(ROWS), k, generator, dtype)
        matrix = expand(weight, dtype)
        assert torch.equal(expanded(weight, dtype), matrix), (n, k)
        for m in ROWS:
            expected = linear(x[:m], matrix, is_own=True)
            for dependent in (False, True):
                found = int4_linear(x[:m], weight, dependent=dependent)
                assert torch.equal(found, expected), (n, k, m, dependent)


@GPU
@pytest.mark.parametrize("tiles", ALL_TILES, ids=str)
@pytest.mark.parametrize("m", [1, 5, 16, 100, 256])
def test_all_tiles_have_the_same_bits(m: int, tiles: Int4Tiles, generator: torch.Generator) -> None:
    configure_blas()
    weight = made(4104, 4096, 128, generator)
    x = rows(m, 4096, generator)
    out = x.new_full((m, 4104), POISON)
    int4_gemm(x, weight, out, tiles)
    assert torch.equal(out, linear(x, expand(weight, torch.bfloat16), is_own=True))


@GPU
@pytest.mark.parametrize("tiles", tiles_of(4), ids=str)
@pytest.mark.parametrize(
    ("group_size", "scale_dtype", "symmetric"),
    [
        *((group_size, torch.float16, False) for group_size in (32, 64, 128, -1)),
        *(
            (group_size, torch.bfloat16, symmetric)
            for group_size in (32, 128)
            for symmetric in (True, False)
        ),
        (128, torch.float16, True),
    ],
    ids=str,
)
def test_all_tiles_for_hopper_have_the_same_bits(
    tiles: RingTiles,
    group_size: int,
    scale_dtype: torch.dtype,
    symmetric: bool,
    generator: torch.Generator,
) -> None:
    configure_blas()
    weight = made(4112, 4096, group_size, generator, scale_dtype=scale_dtype, symmetric=symmetric)
    x = rows(300, 4096, generator)
    words = PackedWords(words=weight.words, scales=weight.scales, zeros=weight.zeros, bits=4)
    matrix = expand(weight, torch.bfloat16)
    for m in (1, 5, 16, 100, 256, 300):
        out = x.new_full((m, 4112), POISON)
        hopper_packed_gemm(x[:m], words, out, tiles)
        assert torch.equal(out, linear(x[:m], matrix, is_own=True)), m


@GPU
def test_the_smallest_and_the_largest_scales_lose_no_bits(generator: torch.Generator) -> None:
    """Nibbles are multiplied by powers near the end of what bfloat16 can hold."""
    configure_blas()
    weight = made(128, 512, 128, generator, scale_dtype=torch.bfloat16, symmetric=True)
    x = rows(1, 512, generator)
    weight.scales[:, ::3] = 2.0**-90
    weight.scales[:, 1::3] = 7.96875
    weight.scales[0] = 0
    assert torch.equal(
        int4_linear(x, weight), linear(x, expand(weight, torch.bfloat16), is_own=True)
    )


def test_few_rows_are_multiplied_in_registers_and_many_as_a_matrix() -> None:
    assert [
        choose(m, torch.bfloat16) is not None for m in (1, 16, 17, 64, MOST_ROWS, MOST_ROWS + 1)
    ] == [True] * 5 + [False]
    assert choose(1, torch.float32) is None
