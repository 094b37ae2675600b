"""Products of block weights with activations in 8 bits: the bits of the plain twin, at every number
of rows, whatever instructions the machine has; and how close they are to products in float."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from headwater.kernels.cpu.block_activations import quantize
from headwater.kernels.cpu.block_linear import block_linear, block_product
from headwater.kernels.cpu.tile_kernel import kernel_of
from headwater.kernels.quant import block_activations
from headwater.kernels.quant.block_formats import (
    FORMATS,
    Q4_0,
    Q4_K,
    Q5_1,
    Q5_K,
    Q6_K,
    Q8_0,
    BlockFormat,
    BlockWeight,
    expand,
    pack,
)
from headwater.kernels.quant.block_linear import block_linear as twin
from tests.kernels import block_bits
from tests.kernels.random_blocks import random_rows
from tests.long_values import long_but

formats = pytest.mark.parametrize("format", FORMATS.values(), ids=lambda format: format.name)
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
ROW_COUNTS = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 40)
OTHER_MACHINES = {
    "AVX2": ("haswell", "+avx2,+avx,+fma,+f16c,+sse4.2"),
    "SSE2": ("x86-64", "+sse2"),
}
"""Name and features of a processor, as LLVM knows them."""
IN_CI = {
    Q4_0: torch.float32,
    Q5_1: torch.float32,
    Q8_0: torch.float32,
    Q5_K: torch.bfloat16,
    Q6_K: torch.float32,
}
"""Formats that between them have all parts, each with the type whose products `make test`
computes."""


def activations(num_rows: int, num_inputs: int, dtype: torch.dtype, seed: int = 1) -> torch.Tensor:
    x = torch.randn(num_rows, num_inputs, generator=torch.Generator().manual_seed(seed))
    x[0, :32] = 0
    x[-1, 40] = 300
    # Some blocks of some rows have outliers, and rests for that reason.
    x[1::3, 100] = 50
    x[num_rows // 2, 64:96] *= 1e-36
    return x.to(dtype)


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@dtypes
def test_activations_in_8_bits_have_the_bits_of_the_twin(dtype: torch.dtype) -> None:
    x = activations(40, 1536, dtype)
    rows = quantize(x)
    expected = block_activations.quantize(x)
    has_rest = block_activations.read(expected)[1].counts
    assert 13 <= has_rest.sum() < 40
    assert torch.equal(rows[:, 0], expected[:, 0])
    assert torch.equal(rows[:, 1][has_rest], expected[:, 1][has_rest])


def test_an_activation_is_its_nearest_127th_of_the_largest_of_its_block() -> None:
    x = torch.zeros(1, 64)
    x[0, :4] = torch.tensor([2.54, 0.02, -1.0, 0.03])
    read, _ = block_activations.read(quantize(x))
    # A 127th is 0.02; 1.5 of them are rounded to even.
    assert read.values[0, 0, :4].tolist() == [127, 1, -50, 2]
    assert (read.sum.tolist(), read.half_sum.tolist()) == ([[80, 0]], [[80, 0]])
    torch.testing.assert_close(read.scale, torch.tensor([[0.02, 0.0]]))
    torch.testing.assert_close(read.scaled_sum, torch.tensor([[1.6, 0.0]]))


def test_what_rounding_takes_from_a_block_with_an_outlier_is_its_rest() -> None:
    x = torch.zeros(1, 96)
    x[0, :5] = torch.tensor([2.54, 0.01, -1.0, 0.025, 0.0101])
    # Of numbers in 127ths, the sum of the squares is 20,593 and 21,368.
    x[0, 32:] = 1.0
    x[0, 32] = 10.6
    x[0, 64] = 10.0
    _, rest = block_activations.read(quantize(x))
    assert rest.counts.tolist() == [[True, True, False]]
    # A step is a 254th of 0.02: 0.5 is rounded to 0, 1.25 to 1.
    assert rest.values[0, 0, :5].tolist() == [0, 127, 0, 64, -126]
    assert (rest.sum[0, 0], rest.half_sum[0, 0]) == (65, 65)
    torch.testing.assert_close(rest.scale[0, 0], torch.tensor(0.02 / 254))


# Kernels of these are compiled for float32 anyway; the bits of all formats are those of the twin.
@pytest.mark.parametrize(
    "format", long_but(FORMATS.values(), Q4_0, Q8_0), ids=lambda format: format.name
)
def test_an_outlier_takes_nothing_from_the_inputs_beside_it(format: BlockFormat) -> None:
    """As others are rounded without it: to 0.4 % in place of the 10 % that a step of the outlier's
    would cost."""
    x = torch.randn(16, 1536, generator=torch.Generator().manual_seed(2))
    weight = pack(random_rows(format, 64, 1536), format)
    expanded = expand(weight, torch.float32).double()
    outliers = torch.zeros_like(x)
    outliers[:, 7::32] = 100
    x[:, 7::32] = 0
    exact = x.double() @ expanded.t()
    found = block_linear(x + outliers, [weight]).double() - outliers.double() @ expanded.t()
    assert (found - exact).norm() / exact.norm() < 0.01


@pytest.mark.parametrize(
    ("format", "dtype"),
    [
        pytest.param(format, dtype, marks=() if dtype is IN_CI.get(format) else pytest.mark.long)
        for format in FORMATS.values()
        for dtype in (torch.float32, torch.bfloat16)
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_a_product_has_the_bits_of_the_twin_at_every_number_of_rows_and_threads(
    format: BlockFormat, dtype: torch.dtype
) -> None:
    x = activations(40, 768, dtype)
    for num_outputs in (37, 96):
        weight = pack(random_rows(format, num_outputs, 768), format)
        product = block_product([weight])
        expected = twin(x, [weight])
        for num_rows in ROW_COUNTS:
            for num_threads in (1, 2):
                torch.set_num_threads(num_threads)
                assert torch.equal(product(x[:num_rows]), expected[:num_rows])
                assert torch.equal(product(x[-num_rows:]), expected[-num_rows:])


def test_more_rows_than_a_group_and_parts_of_several_formats_change_no_bit() -> None:
    x = activations(150, 512, torch.float32)
    parts = [
        pack(random_rows(*each), each[0])
        for each in ((Q4_0, 40, 512), (Q8_0, 5, 512), (Q6_K, 33, 512))
    ]
    out = block_linear(x, parts)
    assert torch.equal(out, twin(x, parts))
    assert torch.equal(out[77:78], block_linear(x[77:78], parts))


# To compile the kernels of all formats anew takes half a minute. AVX2 lies between SSE2, which has
# no fused multiply-add, and AVX-512.
@pytest.mark.parametrize(
    ("machine", "num_formats"),
    [
        ("SSE2", 1),
        *((each, len(block_bits.FORMATS)) for each in OTHER_MACHINES),
    ],
)
@pytest.mark.long
def test_other_machines_instructions_give_the_same_bits(machine: str, num_formats: int) -> None:
    """In a process that compiles for such a processor."""
    name, features = OTHER_MACHINES[machine]
    own = {"NUMBA_CPU_NAME": name, "NUMBA_CPU_FEATURES": features}
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.block_bits", str(num_formats)],
        env=os.environ | own,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [each.name for each in block_bits.FORMATS[:num_formats]]


@pytest.mark.parametrize(
    "format",
    long_but(FORMATS.values(), *(each for each in IN_CI if IN_CI[each] is torch.float32)),
    ids=lambda format: format.name,
)
def test_a_product_is_as_close_to_that_in_float64_as_8_bits_allow(format: BlockFormat) -> None:
    """Of standard normal activations a 127th of a block's largest is about 0.017, so its rounding
    errs by 0.005."""
    x = torch.randn(16, 1536, generator=torch.Generator().manual_seed(2))
    weight = pack(random_rows(format, 64, 1536), format)
    exact = x.double() @ expand(weight, torch.float32).double().t()
    error = (block_linear(x, [weight]).double() - exact).norm() / exact.norm()
    assert 1e-3 < error < 0.01


def changed(weight: BlockWeight, byte: int) -> BlockWeight:
    tiles = weight.tiles.clone()
    tiles[1, 2, byte] ^= 1
    return BlockWeight(format=weight.format, tiles=tiles, num_rows=weight.num_rows)


@pytest.mark.parametrize(
    ("format", "byte"),
    [
        (Q4_0, 6),
        (Q4_0, 40),
        (Q5_1, 6),
        (Q5_1, 38),
        (Q6_K, 40),
        (Q6_K, 300),
        (Q6_K, 1400),
        pytest.param(Q4_K, 70, marks=pytest.mark.long),
        pytest.param(Q4_K, 200, marks=pytest.mark.long),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_one_wrong_bit_of_a_scale_a_minimum_or_a_weight_shows(
    format: BlockFormat, byte: int
) -> None:
    """The comparisons above would be worthless if it did not."""
    x = activations(5, 768, torch.float32)
    weight = pack(random_rows(format, 64, 768), format)
    out = block_linear(x, [weight])
    faulty = block_linear(x, [changed(weight, byte)])
    assert (out != faulty).any()
    assert (out[:, :16] == faulty[:, :16]).all()
    assert torch.equal(faulty, twin(x, [changed(weight, byte)]))


def test_nibbles_in_another_order_show() -> None:
    x = activations(5, 768, torch.float32)
    weight = pack(random_rows(Q4_0, 64, 768), Q4_0)
    tiles = weight.tiles.clone()
    tiles[:, :, 32:] = tiles[:, :, 32:] >> 4 | tiles[:, :, 32:] << 4
    swapped = BlockWeight(format=Q4_0, tiles=tiles, num_rows=64)
    assert (block_linear(x, [weight]) != block_linear(x, [swapped])).float().mean() > 0.99


@formats
def test_only_constants_decide_whether_machine_code_is_kept(format: BlockFormat) -> None:
    """A function among them would be another one in each process, and every start would compile."""
    for work in kernel_of(format)._works.values():
        constants = [cell.cell_contents for cell in work.__closure__ or ()]
        assert constants
        assert all(isinstance(each, int | np.generic) for each in constants), constants
