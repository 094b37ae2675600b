from __future__ import annotations

import pytest
import torch

from headwater.kernels.gemm.byte_gemm import (
    byte_linear,
    expanded,
    expanded_twin,
    fits,
    pack_in_place,
)
from headwater.kernels.gemm.gemm import configure_blas, linear, linear_twin
from headwater.kernels.gemm.hopper_packed_gemm import hopper_packed_gemm
from headwater.kernels.gemm.packed_tiles import RingTiles, choose, tiles_of
from headwater.kernels.gemm.packed_words import PackedWords
from headwater.kernels.quant import byte_layout, byte_weights
from headwater.kernels.quant.byte_weights import ByteWeight, Fp8Weight, Int8Weight
from tests.kernels.paging import GPU, POISON, relative_error

ROWS = (1, 2, 8, 9, 16, 17, 64, 100, 200, 256, 400, 1024, 2048, 2304)
SHAPES = [(8192, 8192), (24576, 4096), (4096, 12288), (1168, 896)]
"""[N, K]; the last one is whole in no number of large tiles."""
KINDS = ["fp8", "float16", "bfloat16", "float32"]
"""e4m3 numbers, or integers with scales of a type."""


def made(kind: str, n: int, k: int, num_groups: int, generator: torch.Generator) -> ByteWeight:
    scales = torch.rand(num_groups, n, generator=generator, device=generator.device) * 0.01 + 0.001
    if kind == "fp8":
        values = torch.randn(n, k, generator=generator, device=generator.device)
        return Fp8Weight(values=values.to(torch.float8_e4m3fn), scales=scales)
    integers, zeros = (
        torch.randint(
            0, 256, shape, dtype=torch.uint8, generator=generator, device=generator.device
        )
        for shape in ((n, k), (num_groups, n))
    )
    return Int8Weight(values=integers, scales=scales.to(getattr(torch, kind)), zeros=zeros)


def packed(weight: ByteWeight) -> PackedWords:
    """The packed weight; the one given stays as it is."""
    zeros = weight.zeros if isinstance(weight, Int8Weight) else None
    return PackedWords(
        words=byte_layout.ordered(weight.values), scales=weight.scales, zeros=zeros, bits=8
    )


def test_a_word_has_the_inputs_that_one_thread_multiplies() -> None:
    inputs = byte_layout.ordered(torch.arange(64, dtype=torch.uint8)[None]).view(torch.uint8)[0]
    assert inputs[:8].tolist() == [0, 1, 8, 9, 16, 17, 24, 25]
    assert inputs[16:20].tolist() == [2, 3, 10, 11]


def test_ordered_bytes_are_restored(generator: torch.Generator) -> None:
    values = torch.randint(
        0, 256, (5, 192), dtype=torch.uint8, generator=generator, device=generator.device
    )
    assert torch.equal(byte_layout.restored(byte_layout.ordered(values), torch.uint8), values)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "k", "num_groups"), [(48, 128, 4), (33, 320, 1), (64, 256, 2)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_an_expanded_matrix_has_the_bits_of_its_specification(
    kind: str, n: int, k: int, num_groups: int, dtype: torch.dtype, generator: torch.Generator
) -> None:
    weight = made(kind, n, k, num_groups, generator)
    expected = byte_weights.expand(weight, dtype)
    assert torch.equal(expanded_twin(packed(weight), dtype), expected)
    assert torch.equal(expanded(packed(weight), dtype), expected)
    words = pack_in_place(weight)
    assert words.words.data_ptr() == weight.values.data_ptr()
    assert torch.equal(expanded(words, dtype), expected)


@pytest.mark.parametrize("kind", ["fp8", "float16"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_every_type_of_rows_is_served(
    kind: str, dtype: torch.dtype, generator: torch.Generator
) -> None:
    weight = made(kind, 64, 128, 2, generator)
    x = torch.randn(3, 128, generator=generator, device=generator.device).to(dtype)
    out = byte_linear(x, packed(weight))
    assert out.dtype == dtype
    assert (
        relative_error(out, linear_twin(x.double(), byte_weights.expand(weight, dtype).double()))
        < 3e-3
    )


@pytest.mark.parametrize("fault", ["scale", "zero", "order"])
def test_a_fault_shows(fault: str, generator: torch.Generator) -> None:
    weight = made("float16", 64, 128, 2, generator)
    x = torch.randn(4, 128, generator=generator, device=generator.device)
    reference = linear_twin(x.double(), byte_weights.expand(weight, torch.float32).double())
    words = packed(weight)
    assert words.zeros is not None
    if fault == "scale":
        words.scales[1] *= 1.2
    elif fault == "zero":
        words.zeros[1] ^= 64
    else:
        words.words[:, :4] = words.words[:, :4].flip(1)
    assert relative_error(byte_linear(x, words), reference) > 1e-2


def test_weights_that_the_copy_engine_cannot_read_do_not_fit(generator: torch.Generator) -> None:
    assert fits(made("fp8", 48, 128, 1, generator))
    assert not fits(made("fp8", 40, 128, 1, generator))
    assert not fits(made("fp8", 48, 96, 1, generator))
    assert not fits(made("float16", 48, 128, 8, generator))
    by_input = made("float16", 48, 128, 2, generator)
    assert isinstance(by_input, Int8Weight)
    groups = torch.arange(128).int() % 2
    assert not fits(
        Int8Weight(
            values=by_input.values, scales=by_input.scales, zeros=by_input.zeros, groups=groups
        )
    )


def test_few_rows_are_multiplied_in_registers_and_many_as_a_matrix(
    generator: torch.Generator,
) -> None:
    weight = packed(made("fp8", 64, 128, 1, generator))
    assert [
        choose(m, *weight.shape, weight.bits) is not None for m in (1, 8, 9, 64, 2048, 2049)
    ] == [True] * 5 + [False]


@GPU
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("group_size", [32, 128, -1])
def test_every_number_of_rows_has_the_bits_of_the_expanded_matrix(
    kind: str, group_size: int, generator: torch.Generator
) -> None:
    configure_blas()
    # All shapes in one test, since they share what is compiled.
    for n, k in SHAPES:
        weight = made(kind, n, k, 1 if group_size == -1 else k // group_size, generator)
        x = torch.randn(max(ROWS), k, generator=generator, device=generator.device).bfloat16()
        matrix = byte_weights.expand(weight, torch.bfloat16)
        words = packed(weight)
        assert torch.equal(expanded(words, torch.bfloat16), matrix), (n, k)
        for m in ROWS:
            expected = linear(x[:m], matrix, is_own=True)
            for dependent in (False, True):
                found = byte_linear(x[:m], words, dependent=dependent)
                assert torch.equal(found, expected), (n, k, m, dependent)


@GPU
@pytest.mark.parametrize("tiles", tiles_of(8), ids=str)
@pytest.mark.parametrize("m", [1, 5, 16, 100, 256])
def test_all_tiles_have_the_same_bits(m: int, tiles: RingTiles, generator: torch.Generator) -> None:
    configure_blas()
    weight = made("fp8", 4112, 4096, 32, generator)
    x = torch.randn(m, 4096, generator=generator, device=generator.device).bfloat16()
    out = x.new_full((m, 4112), POISON)
    hopper_packed_gemm(x, packed(weight), out, tiles)
    assert torch.equal(out, linear(x, byte_weights.expand(weight, torch.bfloat16), is_own=True))
