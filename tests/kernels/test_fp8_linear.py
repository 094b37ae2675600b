"""Products of e4m3 weights with activations in the model's type: the bits of the weights expanded,
at every number of rows, whatever instructions the machine has."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from fractions import Fraction

import numpy as np
import pytest
import torch

from headwater.kernels.cpu.fp8_linear import fp8_linear
from headwater.kernels.quant import mxfp4
from headwater.kernels.quant.block_formats import TILE_ROWS
from headwater.kernels.quant.byte_weights import expand
from headwater.kernels.quant.fp8_linear import _add_product, expanded_linear
from headwater.kernels.quant.fp8_tiles import Fp8Tiles, expanded, read
from tests.kernels.random_fp8 import float4_tiles_of, random_float4, random_fp8, tiles_of
from tests.kernels.test_block_linear import OTHER_MACHINES, ROW_COUNTS, activations
from tests.long_values import long_but

dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
shared = pytest.mark.parametrize(
    "is_shared", [False, True], ids=["a scale for each output", "a scale for a tile"]
)


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@shared
@pytest.mark.parametrize("group_size", [32, 64, 192])
def test_tiles_hold_the_numbers_that_they_were_made_of(is_shared: bool, group_size: int) -> None:
    weight = random_fp8(37, 192, group_size, is_shared=is_shared)
    tiles = tiles_of(weight)
    found = read(tiles)
    assert tiles.format.is_shared == is_shared
    assert torch.equal(found.values.view(torch.uint8), weight.values.view(torch.uint8))
    assert torch.equal(found.scales, weight.scales)
    assert tiles.tiles.numel() == 48 * 192 + 192 // group_size * 4 * (3 if is_shared else 48)


@pytest.mark.parametrize(
    ("dtype", "is_shared"),
    [
        (torch.float32, False),
        (torch.bfloat16, True),
        pytest.param(torch.float32, True, marks=pytest.mark.long),
        pytest.param(torch.bfloat16, False, marks=pytest.mark.long),
    ],
)
def test_a_product_has_the_bits_of_the_weights_expanded_at_every_number_of_rows_and_threads(
    dtype: torch.dtype, is_shared: bool
) -> None:
    x = activations(40, 384, dtype)
    for num_outputs, group_size in ((37, 32), (96, 384)):
        weight = random_fp8(num_outputs, 384, group_size, is_shared=is_shared)
        expected = expanded_linear(x, expand(weight, dtype))
        tiles = tiles_of(weight)
        for num_threads in (1, 2):
            torch.set_num_threads(num_threads)
            for num_rows in ROW_COUNTS:
                assert torch.equal(fp8_linear(x[:num_rows], tiles), expected[:num_rows])
                assert torch.equal(fp8_linear(x[-num_rows:], tiles), expected[-num_rows:])


@pytest.mark.parametrize(
    "dtype", long_but((torch.float32, torch.bfloat16), torch.bfloat16), ids=str
)
def test_a_product_of_mxfp4_has_the_bits_of_the_weights_expanded_at_every_number_of_rows(
    dtype: torch.dtype,
) -> None:
    x = activations(40, 160, dtype)
    for num_outputs in (37, 96):
        weight = random_float4(num_outputs, 160)
        expected = expanded_linear(x, mxfp4.expand(weight, dtype))
        tiles = float4_tiles_of(weight)
        assert torch.equal(expanded(tiles, dtype), mxfp4.expand(weight, dtype))
        # Half a byte a number, and a byte a block.
        assert tiles.tiles.numel() == -(-num_outputs // 16) * 16 * (80 + 5)
        for num_rows in ROW_COUNTS:
            assert torch.equal(fp8_linear(x[:num_rows], tiles), expected[:num_rows])


def test_the_twin_rounds_a_product_and_its_sum_once() -> None:
    """Against exact fractions; among the sums are some that lie by less than float64 sees beside a
    middle of two float32 numbers."""
    generator = np.random.default_rng(0)
    total = (generator.standard_normal(400) * 2.0 ** generator.integers(-12, 12, 400)).astype(
        np.float32
    )
    x, weight = (generator.standard_normal(400).astype(np.float32) for _ in range(2))
    total[0] = 1 + 2**-23
    x[0] = 2**-24 * (1 + 2**-23)
    weight[0] = 1 - 2**-23
    total[1] = 1 + 2**-23
    x[1] = 2**-24 * (1 + 2**-23)
    weight[1] = 1 + 2**-22
    found = _add_product(total, x.astype(np.float64), weight.astype(np.float64))
    for out, a, b, c in zip(found, x, weight, total, strict=True):
        exact = Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))
        near = (np.nextafter(out, np.float32(side)) for side in (-np.inf, np.inf))
        assert all(
            abs(Fraction(float(out)) - exact) <= abs(Fraction(float(each)) - exact) for each in near
        )


@dtypes
def test_a_product_is_as_close_to_that_in_float64_as_its_type_allows(dtype: torch.dtype) -> None:
    x = activations(16, 1536, dtype)
    weight = random_fp8(64, 1536, 128, is_shared=dtype is torch.bfloat16)
    expected = x.double() @ expand(weight, dtype).double().t()
    error = (fp8_linear(x, tiles_of(weight)).double() - expected).norm() / expected.norm()
    assert error < (1e-6 if dtype == torch.float32 else 3e-3)


@pytest.mark.parametrize("machine", ["SSE2", *OTHER_MACHINES])
@pytest.mark.long
def test_other_machines_instructions_give_the_same_bits(machine: str) -> None:
    """In a process that compiles for such a processor."""
    name, features = OTHER_MACHINES[machine]
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.fp8_bits"],
        env=os.environ | {"NUMBA_CPU_NAME": name, "NUMBA_CPU_FEATURES": features},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["0", "1"]


@pytest.mark.parametrize("byte", [2, 70, -1], ids=["a scale", "a number", "the last number"])
def test_one_wrong_bit_shows_in_its_outputs_alone(byte: int) -> None:
    x = activations(5, 384, torch.float32)
    weight = tiles_of(random_fp8(64, 384, 128, is_shared=False))
    tiles = weight.tiles.clone()
    tiles[1, 2, byte] ^= 0x20
    changed = Fp8Tiles(format=weight.format, tiles=tiles, num_rows=64, group_size=128)
    out = fp8_linear(x, weight)
    faulty = fp8_linear(x, changed)
    assert (out != faulty).any()
    assert torch.equal(out[:, :TILE_ROWS], faulty[:, :TILE_ROWS])
    assert torch.equal(out[:, 2 * TILE_ROWS :], faulty[:, 2 * TILE_ROWS :])
