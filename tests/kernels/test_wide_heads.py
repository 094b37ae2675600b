"""Attention of heads whose tiles do not fit into shared memory whole: 512 numbers in two bytes, and
128 and more in four."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from headwater.kernels.attention.decode_attention import decode_attention_twin
from headwater.kernels.attention.online_softmax import narrowing, stages_of
from tests.kernels.paging import (
    GPU,
    LONG_INTERPRETED,
    PagedBatch,
    decode,
    prefill,
    relative_error,
    same_bits,
)

BF16 = torch.bfloat16
F32 = torch.float32
SHARED_MEMORY = 227 * 1024
"""Bytes that a program on a Hopper GPU has."""
CASES = [
    pytest.param([70, 530], 4, 1, 512, BF16, 0, 0, id="gemma4-e2b", marks=LONG_INTERPRETED),
    pytest.param([530], 4, 1, 512, BF16, 0, 2, id="gemma4-31b, listed for other layers"),
    pytest.param([70], 4, 1, 512, F32, 0, 0, id="float32", marks=LONG_INTERPRETED),
    pytest.param([130], 2, 1, 256, F32, 40, 0, id="float32 and a window", marks=LONG_INTERPRETED),
    pytest.param([1, 1000, 4097, 700], 8, 1, 512, BF16, 0, 0, id="gemma4-e2b-gpu", marks=GPU),
    pytest.param([1, 1000, 4097, 700], 32, 4, 512, BF16, 0, 2, id="gemma4-31b-gpu", marks=GPU),
    pytest.param([3000, 65], 32, 16, 256, BF16, 1024, 0, id="gemma4-31b-window-gpu", marks=GPU),
    pytest.param(
        [*range(1, 9000, 101)], 32, 8, 256, BF16, 4096, 0, id="many-window-gpu", marks=GPU
    ),
    pytest.param([*range(1, 4500, 151)], 16, 2, 256, BF16, 0, 0, id="many-gpu", marks=GPU),
    pytest.param([1, 1000, 700], 4, 2, 128, F32, 0, 0, id="float32-128-gpu", marks=GPU),
    pytest.param([1, 1000, 700], 4, 1, 256, F32, 0, 0, id="float32-256-gpu", marks=GPU),
    pytest.param([1, 1000, 700], 8, 1, 512, F32, 0, 0, id="float32-512-gpu", marks=GPU),
]


@pytest.mark.parametrize("block_size", [16, pytest.param(64, marks=LONG_INTERPRETED)])
@pytest.mark.parametrize(
    ("seq_lens", "num_q", "num_kv", "head_dim", "dtype", "window", "listed_group"), CASES
)
def test_chunks_and_decode_agree_with_float64_and_to_the_bit(
    seq_lens: list[int],
    num_q: int,
    num_kv: int,
    head_dim: int,
    dtype: torch.dtype,
    window: int,
    listed_group: int,
    block_size: int,
    generator: torch.Generator,
) -> None:
    batch = PagedBatch(seq_lens, num_q, num_kv, head_dim, block_size, generator, dtype=dtype)
    options: dict[str, Any] = {"scale": 0.1, "window": window}
    counts = [min(length, 40) for length in seq_lens]
    q = batch.queries(sum(counts))
    chunks = prefill(batch, q, counts, **options, listed_group=listed_group)
    last = torch.tensor(counts).cumsum(0).to(q.device) - 1
    out = decode(batch, q[last], **options)
    tables = batch.lengths(), batch.table_rows, batch.block_tables
    twin = decode_attention_twin(q[last].double(), *batch.wide_caches(), *tables, **options)
    for i, length in enumerate(seq_lens):
        assert relative_error(out[i], twin[i]) < 5e-3, length
    assert same_bits(out, chunks[last])
    # Tiles that were listed for another number of heads leave no token out.
    assert same_bits(prefill(batch, q, counts, **options), chunks)
    for i in range(len(seq_lens)):
        assert same_bits(decode(batch, q[last], [i], **options)[0], out[i]), seq_lens[i]


@pytest.mark.parametrize(
    ("seq_lens", "num_q", "head_dim", "dtype"),
    [
        pytest.param([530, 580, 20], 4, 512, BF16, id="few", marks=LONG_INTERPRETED),
        pytest.param([8200, 9000, 9100, 700], 8, 512, BF16, id="many", marks=GPU),
        pytest.param([8200, 9000, 9100, 700], 4, 128, F32, id="float32", marks=GPU),
    ],
)
def test_sharing_changes_no_bit(
    seq_lens: list[int], num_q: int, head_dim: int, dtype: torch.dtype, generator: torch.Generator
) -> None:
    share = tuple(8 if length > 500 else 0 for length in seq_lens)
    batch = PagedBatch(seq_lens, num_q, 1, head_dim, 64, generator, share=share, dtype=dtype)
    q = batch.queries(len(seq_lens))
    assert same_bits(decode(batch, q, share=True), decode(batch, q))


@pytest.mark.parametrize("head_dim", [64, 128, 256, 512])
@pytest.mark.parametrize("num_bytes", [2, 4])
def test_queries_and_tiles_fit_into_shared_memory(head_dim: int, num_bytes: int) -> None:
    by = narrowing(head_dim * num_bytes)
    queries = 128 // by * head_dim * num_bytes
    tiles = 4 * (64 // by) * head_dim * num_bytes * stages_of(2, head_dim * num_bytes)
    assert queries + tiles <= SHARED_MEMORY
