from __future__ import annotations

import torch

from headwater.bench.attention_cases import HEAD_DIM, HEADS, PAGE, Batch


def batch_of(counts: list[int], lens: list[int]) -> Batch:
    table = torch.arange(len(lens) * max(lens) // PAGE).view(len(lens), -1)
    return Batch("", counts, lens, torch.randn(sum(counts), HEADS, HEAD_DIM), [], table)


def test_the_end_of_the_first_sequence_is_a_chunk_on_the_rest_of_it() -> None:
    batch = batch_of([64, 64], [128, 128])
    part, rows = batch.end_of_first(21)
    assert (part.counts, part.lens, rows) == ([21], [128], slice(43, 64))
    assert torch.equal(part.q, batch.q[43:64])
    assert part.table.tolist() == [[0, 1]]


def test_a_limit_is_of_products_for_prompts_and_of_memory_for_decode() -> None:
    prompt = batch_of([8192], [8192])
    decode = batch_of([1] * 64, [2048] * 64)
    assert not prompt.decodes
    assert decode.decodes
    assert round(prompt.limit_ms, 3) == 0.691  # 550 GFLOP at 796 TFLOP/s
    assert round(decode.limit_ms, 3) == 0.126  # 0.54 GB at 4.27 TB/s
