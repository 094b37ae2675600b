from __future__ import annotations

import pytest
import torch

from headwater.kernels.decode_attention import decode_attention_twin
from tests.kernels.paging import GPU, LONG, PagedBatch, decode, formats, relative_error, same_bits

BOUND = 5e-3
"""Weights are rounded to bfloat16 before they meet the values, and so is the output: 2 to 4e-3."""
SMALL = [1, 64, 511, 512, 513, 1100]
LARGE = [1, 3, 511, 512, 513, 1024, 1025, 4097, 30_000, 700, 64, 65, 31, 32, 33, 95, 97, 129]
"""As many as a GPU computes another way than a single row, or the many below."""
HEADS = [pytest.param(4, 2, 64, id="group-2"), pytest.param(3, 1, 128, id="group-3")]
GPU_HEADS = [
    pytest.param(32, 8, 128, id="qwen3-8b", marks=GPU),
    pytest.param(16, 8, 128, id="qwen3-0.6b", marks=GPU),
    pytest.param(9, 3, 64, id="smollm2", marks=GPU),
    pytest.param(28, 4, 128, id="group-7", marks=GPU),
]


def lengths(device: torch.device) -> list[int]:
    return LARGE if device.type == "cuda" else SMALL


@pytest.mark.parametrize(("block_size", "fp8"), formats(16, 32, 64, 128))
@pytest.mark.parametrize(("num_q", "num_kv", "head_dim"), [HEADS[0], *GPU_HEADS])
def test_decode_attention_agrees_with_float64(
    num_q: int, num_kv: int, head_dim: int, block_size: int, fp8: bool, generator: torch.Generator
) -> None:
    batch = PagedBatch(lengths(generator.device), num_q, num_kv, head_dim, block_size, generator, fp8=fp8)
    q = batch.queries(len(batch.seq_lens))
    twin = decode_attention_twin(
        q.double(), *batch.wide_caches(), batch.lengths(), batch.table_rows, batch.block_tables
    )
    out = decode(batch, q)
    for i, length in enumerate(batch.seq_lens):
        assert relative_error(out[i], twin[i]) < BOUND, length


@pytest.mark.parametrize(("num_q", "num_kv", "head_dim"), [HEADS[1], *GPU_HEADS])
def test_a_sequence_has_the_same_bits_alone(num_q: int, num_kv: int, head_dim: int, generator: torch.Generator) -> None:
    batch = PagedBatch(lengths(generator.device), num_q, num_kv, head_dim, 64, generator)
    q = batch.queries(len(batch.seq_lens))
    together = decode(batch, q)
    for i in range(len(batch.seq_lens)):
        assert same_bits(decode(batch, q, [i])[0], together[i]), batch.seq_lens[i]


@pytest.mark.parametrize("fp8", [False, pytest.param(True, marks=LONG)], ids=["bf16", "fp8"])
@pytest.mark.parametrize(("num_q", "num_kv", "head_dim"), [HEADS[0], *GPU_HEADS])
def test_programs_that_draw_many_items_give_the_bits_of_few_in_every_layer(
    num_q: int, num_kv: int, head_dim: int, fp8: bool, generator: torch.Generator
) -> None:
    on_gpu = generator.device.type == "cuda"
    seq_lens = torch.randint(
        1, 3000 if on_gpu else 600, (90 if on_gpu else 6,), generator=generator, device=generator.device
    )
    batch = PagedBatch(seq_lens.tolist(), num_q, num_kv, head_dim, 64, generator, fp8=fp8)
    q = batch.queries(len(seq_lens))
    together = decode(batch, q, layers=3 if on_gpu else 2)
    for i in range(len(seq_lens)):
        assert same_bits(decode(batch, q, [i])[0], together[i]), batch.seq_lens[i]


def test_a_row_of_length_zero_is_left_alone(generator: torch.Generator) -> None:
    batch = PagedBatch([70, 600], 4, 2, 64, 16, generator)
    batch.seq_lens = [0, 600]
    q = batch.queries(2)
    out = decode(batch, q)
    assert (out[0] == 300).all()
    assert same_bits(out[1], decode(batch, q, [1])[0])
