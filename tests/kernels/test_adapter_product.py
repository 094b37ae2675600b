"""Products with low-rank adapters: on a CPU, and by Triton's kernels."""

from __future__ import annotations

import pytest
import torch

from headwater.kernels.adapters.adapter_product import add_adapters_twin
from headwater.kernels.adapters.adapter_tiles import (
    FEW_ROWS,
    FEW_TILE,
    MANY_TILE,
    adapter_tiles,
    adapter_tiles_twin,
)
from headwater.kernels.adapters.expand import expand, expand_gated
from headwater.kernels.adapters.hopper_shrink import shrink_pieces
from headwater.kernels.adapters.row_additions import Branch, CudaAddition
from headwater.kernels.adapters.shrink import shrink, shrunk_like
from headwater.kernels.adapters.slab import RANK_UNIT, Slab, SlabLayer
from headwater.kernels.cpu.adapter_product import AdapterAddition, RowAdditions
from headwater.kernels.cpu.adapter_tiles import adapter_tiles as cpu_tiles
from headwater.kernels.norm.silu_mul import gelu_tanh_mul, silu_mul
from tests.kernels.paging import LONG_INTERPRETED, same_bits

LAYERS = {
    "one projection": SlabLayer(64, (96,), 16, 1),
    "queries, keys and values in two pieces": SlabLayer(1040, (272, 16, 64), 16, 1),
}
RANKS = (8, 24)
"""Padded ranks of the adapters in slots 0 and 1; slot 4 has one that begins behind them."""


def slab_of(layer: SlabLayer, dtype: torch.dtype, generator: torch.Generator) -> Slab:
    device = generator.device
    num_ranks = torch.zeros(6, dtype=torch.int32, device=device)
    num_ranks[0] = RANKS[0]
    num_ranks[1] = RANKS[1]
    num_ranks[4] = RANK_UNIT
    numbers = torch.randn(6 * RANK_UNIT * (layer.end + 16), generator=generator, device=device)
    factors = torch.rand(6, 5, generator=generator, device=device) + 0.5
    # An adapter without its last projection.
    factors[4, layer.column + len(layer.parts) - 1] = 0
    return Slab((numbers * 0.1).to(dtype), num_ranks, factors)


def rows_of(
    num_rows: int, layer: SlabLayer, dtype: torch.dtype, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    device = generator.device
    x = torch.randn(num_rows, layer.num_inputs, generator=generator, device=device)
    y = torch.randn(num_rows, layer.num_outputs, generator=generator, device=device)
    return x.to(dtype), y.to(dtype)


def slots_of(*slots: int, device: torch.device) -> torch.Tensor:
    return torch.tensor(slots, dtype=torch.int32, device=device)


def add(
    x: torch.Tensor, y: torch.Tensor, slots: torch.Tensor, slab: Slab, layer: SlabLayer
) -> None:
    tiles = adapter_tiles(slots, slab.num_ranks)
    shrunk = shrunk_like(x, tiles, layer)
    shrink(x, shrunk, tiles, slab, layer)
    expand(shrunk, y, tiles, slab, layer)


def add_on_cpu(
    x: torch.Tensor, y: torch.Tensor, slots: torch.Tensor, slab: Slab, layer: SlabLayer
) -> None:
    rows = RowAdditions().plan_adapters(slots, slab)
    AdapterAddition(slab, layer).finish(x, y, None, rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_a_cpu_adds_what_the_twin_adds(layer: SlabLayer, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    slab = slab_of(layer, dtype, generator)
    x, y = rows_of(11, layer, dtype, generator)
    # A full tile of slot 1, and a row in its next one.
    slots = slots_of(0, -1, 1, 4, 1, -1, 1, 1, 0, 1, 4, device=x.device)
    expected = y.clone()
    add_adapters_twin(x, expected, slots, slab, layer)
    found = y.clone()
    add_on_cpu(x, found, slots, slab, layer)
    # bfloat16 has 8 bits; sums are made in another order.
    torch.testing.assert_close(found, expected, rtol=0.008, atol=1e-5)
    assert torch.equal(found[slots < 0], y[slots < 0])
    for row in range(len(y)):
        alone = y[row : row + 1].clone()
        add_on_cpu(x[row : row + 1].clone(), alone, slots[row : row + 1].clone(), slab, layer)
        assert same_bits(alone, found[row : row + 1])


def test_a_cpu_finds_rows_of_each_adapter_in_tiles() -> None:
    slots = slots_of(2, -1, 0, 2, 2, 2, 0, 2, -1, device=torch.device("cpu"))
    assert cpu_tiles(slots, 3)[:4].tolist() == [
        [0, 3, 4, 5],
        [2, 6, -1, -1],
        [7, -1, -1, -1],
        [-1, -1, -1, -1],
    ]


@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_a_gpu_adds_what_the_twin_adds_with_bits_of_each_row_alone(
    layer: SlabLayer, generator: torch.Generator
) -> None:
    slab = slab_of(layer, torch.bfloat16, generator)
    x, y = rows_of(6, layer, torch.bfloat16, generator)
    slots = slots_of(0, -1, 1, 4, 1, -1, device=x.device)
    expected = y.clone()
    add_adapters_twin(x, expected, slots, slab, layer)
    found = y.clone()
    add(x, found, slots, slab, layer)
    torch.testing.assert_close(found, expected, rtol=0.008, atol=0.02)
    assert torch.equal(found[slots < 0], y[slots < 0])
    for row in (0, 2, 3):
        alone = y[row : row + 1].clone()
        add(x[row : row + 1], alone, slots[row : row + 1], slab, layer)
        assert same_bits(alone, found[row : row + 1])


def test_many_rows_have_the_bits_of_few(generator: torch.Generator) -> None:
    layer = SlabLayer(1040, (32,), 16, 1)
    slab = slab_of(layer, torch.bfloat16, generator)
    x, y = rows_of(FEW_ROWS + 3, layer, torch.bfloat16, generator)
    slots = torch.full((FEW_ROWS + 3,), -1, dtype=torch.int32, device=x.device)
    slots[5:40] = 1
    slots[70] = 0
    slots[-2:] = 1
    many = y.clone()
    add(x, many, slots, slab, layer)
    few = y.clone()
    chosen = torch.nonzero(slots >= 0)[:, 0]
    part = few[chosen]
    add(x[chosen], part, slots[chosen], slab, layer)
    few[chosen] = part
    assert not torch.equal(many, y)
    assert same_bits(many, few)


@pytest.mark.parametrize("is_gelu", [False, True], ids=["silu", "gelu"])
@pytest.mark.parametrize("num_rows", [7, FEW_ROWS + 5])
def test_gates_behind_adapters_have_the_bits_of_two_launches(
    num_rows: int, is_gelu: bool, generator: torch.Generator
) -> None:
    layer = SlabLayer(48, (80, 80), 16, 1)
    slab = slab_of(layer, torch.bfloat16, generator)
    x, y = rows_of(num_rows, layer, torch.bfloat16, generator)
    slots = torch.full((num_rows,), -1, dtype=torch.int32, device=x.device)
    slots[:5] = slots_of(0, -1, 1, 4, 1, device=x.device)
    tiles = adapter_tiles(slots, slab.num_ranks)
    shrunk = shrunk_like(x, tiles, layer)
    shrink(x, shrunk, tiles, slab, layer)
    found = y.new_empty(num_rows, 80)
    expand_gated(shrunk, y, found, tiles, slab, layer, is_gelu=is_gelu)
    expand(shrunk, y, tiles, slab, layer)
    assert same_bits(found, (gelu_tanh_mul if is_gelu else silu_mul)(y))


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 200, FEW_ROWS])
def test_a_hopper_makes_the_sums_of_any_gpu(num_rows: int, generator: torch.Generator) -> None:
    """The inputs end with a short piece, and the rank exceeds what is multiplied at once."""
    layer = SlabLayer(2064, (272, 16, 64), 16, 1)
    slab = slab_of(layer, torch.bfloat16, generator)
    x, y = rows_of(num_rows, layer, torch.bfloat16, generator)
    slots = slots_of(1, 0, 4, -1, device=x.device).repeat(num_rows)[:num_rows]
    tiles = adapter_tiles(slots, slab.num_ranks)
    found, expected = (shrunk_like(x, tiles, layer).zero_() for _ in range(2))
    shrink_pieces(x, found, tiles, slab, layer)
    shrink(x, expected, tiles, slab, layer)
    assert bool(expected.any())
    assert torch.equal(found.view(torch.int32), expected.view(torch.int32))
    added = y.clone()
    addition = CudaAddition(slab, layer, Branch())
    addition.finish(x, added, addition.begin(x, tiles), tiles)
    expand(expected, y, tiles, slab, layer)
    assert same_bits(added, y)


@pytest.mark.parametrize(
    ("num_rows", "num_adapters"),
    [(1, 1), (40, 3), (FEW_ROWS + 88, 5), pytest.param(FEW_ROWS, 40, marks=LONG_INTERPRETED)],
)
def test_every_row_with_an_adapter_lies_in_one_tile(
    num_rows: int, num_adapters: int, generator: torch.Generator
) -> None:
    device = generator.device
    slots = torch.randint(
        -1, num_adapters, (num_rows,), generator=generator, device=device, dtype=torch.int32
    )
    slots[0] = 0
    num_ranks = torch.full((num_adapters,), 8, dtype=torch.int32, device=device)
    tiles = adapter_tiles(slots, num_ranks)
    found: dict[int, list[list[int]]] = {}
    for slot, rows in zip(
        tiles.slots[: int(tiles.count[1])].tolist(), tiles.rows.tolist(), strict=False
    ):
        found.setdefault(slot, []).append([row for row in rows if row >= 0])
    assert int(tiles.count[1]) == sum(map(len, found.values()))
    assert tiles.tile_size == (FEW_TILE if num_rows <= FEW_ROWS else MANY_TILE)
    assert found == adapter_tiles_twin(slots, tiles.tile_size)
