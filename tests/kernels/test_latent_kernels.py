from __future__ import annotations

import pytest
import torch

from headwater.kernels.attention.hopper_attention import is_hopper
from tests.kernels.latents import LatentBatch
from tests.kernels.paging import GPU, LONG_INTERPRETED, relative_error, same_bits

BOUND = 5e-3
"""Weights are rounded to bfloat16 before they meet the values, and so is the output."""
SMALL = [1, 512, 513]
LARGE = [1, 2, 31, 32, 33, 64, 511, 512, 513, 1024, 1025, 4097, 20_000, 700]
Shape = tuple[int, int, int, int, torch.dtype]
TINY: Shape = (3, 32, 8, 16, torch.bfloat16)
"""Heads, rank, rotary numbers, block size, type of the cache; queries of e4m3 are bfloat16."""
IN_E4M3 = [
    pytest.param((3, 32, 8, 16, torch.float8_e4m3fn), id="tiny-e4m3"),
    pytest.param((40, 256, 32, 64, torch.float8_e4m3fn), id="minicpm3-e4m3", marks=GPU),
    pytest.param((20, 512, 64, 64, torch.float8_e4m3fn), id="glm-4.7-flash-e4m3", marks=GPU),
    pytest.param((128, 512, 64, 32, torch.float8_e4m3fn), id="deepseek-v3-e4m3", marks=GPU),
]
SHAPES = [
    pytest.param(TINY, id="tiny"),
    pytest.param((4, 16, 16, 32, torch.float32), id="tiny-float32"),
    pytest.param((5, 48, 16, 64, torch.bfloat16), id="odd-rank", marks=LONG_INTERPRETED),
    pytest.param((66, 32, 16, 16, torch.bfloat16), id="many-heads", marks=LONG_INTERPRETED),
]
GPU_SHAPES = [
    pytest.param((40, 256, 32, 64, torch.bfloat16), id="minicpm3", marks=GPU),
    pytest.param((20, 512, 64, 64, torch.bfloat16), id="glm-4.7-flash", marks=GPU),
    pytest.param((128, 512, 64, 32, torch.bfloat16), id="deepseek-v3", marks=GPU),
]
HOPPER_SHAPES = [
    pytest.param((num_heads, 512, 64, block_size, torch.bfloat16), id=f"{num_heads}-{block_size}")
    for num_heads, block_size in ((16, 64), (20, 64), (64, 128), (128, 64))
]


def made(generator: torch.Generator, shape: Shape, lens: list[int] | None = None) -> LatentBatch:
    of_device = LARGE if generator.device.type == "cuda" else SMALL
    of_queries = torch.bfloat16 if shape[4].itemsize == 1 else shape[4]
    batch = LatentBatch.random(lens or of_device, *shape[:4], generator, of_queries)
    return batch.in_dtype(shape[4])


@pytest.mark.parametrize("shape", [*SHAPES, *GPU_SHAPES, *IN_E4M3])
def test_decode_agrees_with_float64(shape: Shape, generator: torch.Generator) -> None:
    batch = made(generator, shape)
    q = batch.queries(len(batch.pages.seq_lens))
    out = batch.decode(q)
    for i, length in enumerate(batch.pages.seq_lens):
        assert relative_error(out[i], batch.twin(q[i : i + 1], i, length)[0]) < BOUND, length


@pytest.mark.parametrize("shape", [*SHAPES, *GPU_SHAPES, *IN_E4M3])
def test_prefill_agrees_with_float64(shape: Shape, generator: torch.Generator) -> None:
    lens = [1, 40, 530, *([1100] if generator.device.type == "cuda" else [])]
    counts = [1, 40, 25, 9][: len(lens)]
    batch = made(generator, shape, lens)
    q = batch.queries(sum(counts))
    out = batch.prefill(q, counts)
    first = 0
    for i, (count, length) in enumerate(zip(counts, lens, strict=True)):
        rows = slice(first, first + count)
        assert relative_error(out[rows], batch.twin(q[rows], i, length)) < BOUND, length
        first += count


@pytest.mark.parametrize("shape", [SHAPES[0], *GPU_SHAPES, *IN_E4M3])
def test_a_row_has_the_same_bits_alone_and_however_splits_are_divided(
    shape: Shape, generator: torch.Generator
) -> None:
    batch = made(generator, shape)
    q = batch.queries(len(batch.pages.seq_lens))
    together = batch.decode(q)
    for num_ranges, max_partials in ((1, None), (5, None), (2, 1), (len(q), 1)):
        divided = batch.decode(q, num_ranges=num_ranges, max_partials=max_partials)
        assert same_bits(divided, together), (num_ranges, max_partials)
    for i, length in enumerate(batch.pages.seq_lens):
        assert same_bits(batch.decode(q, [i])[0], together[i]), length


@pytest.mark.parametrize("shape", [SHAPES[0], *GPU_SHAPES, *IN_E4M3])
def test_prefill_has_the_bits_of_decode_at_any_cut(
    shape: Shape, generator: torch.Generator
) -> None:
    batch = made(generator, shape, [560])
    q = batch.queries(60)
    whole = batch.prefill(q, [60])
    for count in (1, 59):
        part = batch.prefill(q[:count].contiguous(), [count], [500 + count])
        assert same_bits(part, whole[:count]), count
    last = batch.decode(q[-1:].contiguous(), [0])
    assert same_bits(last[0], whole[-1])


@pytest.mark.gpu
@pytest.mark.parametrize("shape", HOPPER_SHAPES)
def test_hopper_has_the_bits_of_any_gpu(shape: Shape, generator: torch.Generator) -> None:
    if not is_hopper(generator.device):
        pytest.skip("not a Hopper GPU")
    batch = made(generator, shape)
    q = batch.queries(len(batch.pages.seq_lens))
    expected = batch.decode(q)
    for num_ranges in (None, 1, 3):
        found = batch.decode(q, hopper=True, num_ranges=num_ranges)
        assert same_bits(found, expected), num_ranges
    counts = [min(length, 300) for length in batch.pages.seq_lens]
    q = batch.queries(sum(counts))
    assert same_bits(batch.prefill(q, counts, hopper=True), batch.prefill(q, counts))
