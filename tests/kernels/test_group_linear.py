"""Products of weights in groups with activations in 8 bits: the bits of the plain twin, at every
number of rows, whatever instructions the machine has; and how close they are to products in
float."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from headwater.kernels.cpu.block_activations import quantize_tokens
from headwater.kernels.cpu.group_linear import group_linear
from headwater.kernels.quant import block_activations
from headwater.kernels.quant.block_formats import TILE_ROWS
from headwater.kernels.quant.group_linear import group_linear as twin
from headwater.kernels.quant.group_tiles import GROUP_FORMATS, GroupFormat, GroupTiles, read
from tests.kernels.random_groups import random_groups
from tests.kernels.test_block_linear import OTHER_MACHINES, ROW_COUNTS, activations

formats = pytest.mark.parametrize(
    "format",
    GROUP_FORMATS,
    ids=lambda format: f"{format.bits} bits, {str(format.scale_dtype).removeprefix('torch.')}",
)
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
IN_CI = {
    GroupFormat(4, torch.float16): torch.float32,
    GroupFormat(8, torch.bfloat16): torch.bfloat16,
}
"""Formats with the type whose products `make test` computes: each number of bits."""
INT4 = GroupFormat(4, torch.float16)
INT8 = GroupFormat(8, torch.bfloat16)


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@dtypes
def test_tokens_in_8_bits_have_the_bits_of_the_twin(dtype: torch.dtype) -> None:
    x = activations(40, 1536, dtype)
    assert torch.equal(quantize_tokens(x), block_activations.quantize_tokens(x))


def test_a_token_is_rounded_to_a_127th_of_its_largest_number() -> None:
    x = torch.zeros(2, 64)
    x[0, 40] = -2.54
    x[0, 1] = 0.05
    x[1, 3] = 1.27
    (rounded,) = block_activations.read(quantize_tokens(x))
    assert rounded.values[0].flatten()[[1, 40]].tolist() == [2, -127]
    assert rounded.values[1, 0, 3] == 127
    torch.testing.assert_close(rounded.scale, torch.tensor([[0.02, 0.02], [0.01, 0.01]]))


@formats
@pytest.mark.parametrize("group_size", [32, 64, 256])
def test_tiles_hold_the_numbers_that_they_were_made_of(
    format: GroupFormat, group_size: int
) -> None:
    weight, exact = random_groups(format, 37, 256, group_size)
    numbers = read(weight)
    of_inputs = torch.arange(256) // group_size
    found = (
        numbers.values.double() - numbers.zeros.double()[:, of_inputs]
    ) * numbers.scales.double()[:, of_inputs]
    assert torch.equal(found, exact)
    stored = 37 * 256 * format.bits // 8 + 37 * (256 // group_size) * (
        format.scale_dtype.itemsize + 1
    )
    assert weight.tiles.numel() == stored * 48 // 37


@pytest.mark.parametrize(
    ("format", "dtype"),
    [
        pytest.param(format, dtype, marks=() if dtype is IN_CI.get(format) else pytest.mark.long)
        for format in GROUP_FORMATS
        for dtype in (torch.float32, torch.bfloat16)
    ],
    ids=str,
)
def test_a_product_has_the_bits_of_the_twin_at_every_number_of_rows_and_threads(
    format: GroupFormat, dtype: torch.dtype
) -> None:
    x = activations(40, 768, dtype)
    rounds_tokens = format.bits == 8 and format.scale_dtype != torch.float16
    for num_outputs, group_size in ((37, 32), (96, 768)):
        weight, _ = random_groups(format, num_outputs, 768, group_size, rounds_tokens=rounds_tokens)
        expected = twin(x, weight)
        for num_threads in (1, 2):
            torch.set_num_threads(num_threads)
            for num_rows in ROW_COUNTS:
                assert torch.equal(group_linear(x[:num_rows], weight), expected[:num_rows])
                assert torch.equal(group_linear(x[-num_rows:], weight), expected[-num_rows:])


@pytest.mark.parametrize(
    ("machine", "num_formats"),
    [("SSE2", 1), *((each, len(GROUP_FORMATS)) for each in OTHER_MACHINES)],
)
@pytest.mark.long
def test_other_machines_instructions_give_the_same_bits(machine: str, num_formats: int) -> None:
    """In a process that compiles for such a processor."""
    name, features = OTHER_MACHINES[machine]
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.group_bits", str(num_formats)],
        env=os.environ | {"NUMBA_CPU_NAME": name, "NUMBA_CPU_FEATURES": features},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(number) for number in range(num_formats)]


@pytest.mark.parametrize(
    ("format", "rounds_tokens", "most"),
    [
        (INT4, False, 0.01),
        pytest.param(INT8, False, 0.01, marks=pytest.mark.long),
        (INT8, True, 0.02),
    ],
)
def test_a_product_is_as_close_to_that_in_float64_as_8_bits_allow(
    format: GroupFormat, rounds_tokens: bool, most: float
) -> None:
    """A 127th of the largest of 1,536 normal numbers is about 0.028, so its rounding errs by
    0.008."""
    x = torch.randn(16, 1536, generator=torch.Generator().manual_seed(2))
    order = torch.randperm(1536, generator=torch.Generator().manual_seed(3))
    weight, exact = random_groups(format, 64, 1536, 128, order=order, rounds_tokens=rounds_tokens)
    expected = x.double() @ exact.t()
    error = (group_linear(x, weight).double() - expected).norm() / expected.norm()
    assert 1e-3 < error < most


@pytest.mark.parametrize(
    ("format", "byte"),
    # A scale, a zero point, and a number of the first and of the last input.
    [(INT4, 7), (INT4, 35), (INT4, 50), (INT4, -1), (INT8, 7), (INT8, 35), (INT8, 50), (INT8, -1)],
)
def test_one_wrong_bit_shows_in_its_outputs_alone(format: GroupFormat, byte: int) -> None:
    """The comparisons above would be worthless if it did not."""
    x = activations(5, 768, torch.float32)
    weight, _ = random_groups(format, 64, 768, 128)
    tiles = weight.tiles.clone()
    tiles[1, 2, byte] ^= 1
    changed = GroupTiles(format=format, tiles=tiles, num_rows=64, group_size=128)
    out = group_linear(x, weight)
    faulty = group_linear(x, changed)
    assert (out != faulty).any()
    assert torch.equal(out[:, :TILE_ROWS], faulty[:, :TILE_ROWS])
    assert torch.equal(faulty, twin(x, changed))
