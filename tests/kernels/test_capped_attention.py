"""Attention whose scores are capped by tanh, as Gemma 2's: decode, prompts and shared prefixes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from headwater.kernels.attention.decode_attention import decode_attention_twin
from tests.kernels.paging import (
    GPU,
    LONG_INTERPRETED,
    PagedBatch,
    decode,
    prefill,
    relative_error,
    same_bits,
)

SIZES = [
    pytest.param([5, 70, 600], 4, 2, 64, 0, id="small"),
    pytest.param([5, 70, 600], 3, 1, 64, 100, id="window"),
    pytest.param([5, 512, 1300], 4, 1, 256, 0, id="gemma2-2b", marks=LONG_INTERPRETED),
    pytest.param([1, 1000, 4097, 9000], 16, 8, 256, 4096, id="gemma2-9b", marks=GPU),
    pytest.param([1, 1000, 4097, 9000], 32, 16, 128, 0, id="gemma2-27b", marks=GPU),
]
CAP = 3.0
"""Scores of random queries and keys reach 20 with this scale."""
OPTIONS: dict[str, Any] = {"softcap": CAP, "scale": 0.5}


@pytest.mark.parametrize("fp8", [False, pytest.param(True, marks=GPU)], ids=["bf16", "fp8"])
@pytest.mark.parametrize(("seq_lens", "num_q", "num_kv", "head_dim", "window"), SIZES)
def test_scores_are_capped_in_decode_and_in_any_chunk(
    seq_lens: list[int],
    num_q: int,
    num_kv: int,
    head_dim: int,
    window: int,
    fp8: bool,
    generator: torch.Generator,
) -> None:
    batch = PagedBatch(seq_lens, num_q, num_kv, head_dim, 64, generator, fp8=fp8)
    options = OPTIONS | {"window": window}
    counts = [min(length, 40) for length in seq_lens]
    q = batch.queries(sum(counts))
    chunks = prefill(batch, q, counts, **options)
    last = torch.tensor(counts).cumsum(0).to(q.device) - 1
    out = decode(batch, q[last], **options)
    tables = batch.lengths(), batch.table_rows, batch.block_tables
    twin = decode_attention_twin(q[last].double(), *batch.wide_caches(), *tables, **options)
    plain = decode_attention_twin(
        q[last].double(), *batch.wide_caches(), *tables, **options | {"softcap": 0.0}
    )
    for i, length in enumerate(seq_lens):
        assert relative_error(out[i], twin[i]) < 5e-3, length
    assert relative_error(plain, twin) > 0.05
    assert same_bits(out, chunks[last])
    for i in range(len(seq_lens)):
        assert same_bits(decode(batch, q[last], [i], **options)[0], out[i]), seq_lens[i]


@pytest.mark.parametrize(
    ("seq_lens", "num_shared"),
    [
        pytest.param([580, 530, 20], 512, id="few"),
        pytest.param([9000, 8200, 9100, 700], 8192, id="many", marks=GPU),
    ],
)
def test_sharing_changes_no_bit(
    seq_lens: list[int], num_shared: int, generator: torch.Generator
) -> None:
    share = tuple(
        min(length, num_shared) // 64 if length > 600 or num_shared < 600 else 0
        for length in seq_lens
    )
    batch = PagedBatch(seq_lens, 4, 2, 64, 64, generator, share=share)
    q = batch.queries(len(seq_lens))
    assert same_bits(decode(batch, q, share=True, **OPTIONS), decode(batch, q, **OPTIONS))
