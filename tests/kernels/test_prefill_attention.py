from __future__ import annotations

import pytest
import torch

from headwater.kernels.attention.prefill_attention import prefill_attention_twin
from tests.kernels.paging import (
    GPU,
    LONG,
    LONG_INTERPRETED,
    PagedBatch,
    decode,
    formats,
    prefill,
    relative_error,
    same_bits,
)

CASES = [
    pytest.param([5, 512, 700, 530], [5, 3, 40, 70], 4, 2, 64, id="small", marks=LONG_INTERPRETED),
    pytest.param([77, 600], [77, 1], 3, 1, 64, id="group-3"),
    pytest.param(
        [1, 1000, 4097, 2048, 513], [1, 1000, 33, 2048, 512], 32, 8, 128, id="qwen3-8b", marks=GPU
    ),
    pytest.param([3000, 65], [3000, 65], 16, 8, 128, id="qwen3-0.6b", marks=GPU),
    pytest.param([1500, 9000], [700, 100], 28, 4, 128, id="group-7", marks=GPU),
    pytest.param([1, 2100, 640], [1, 1100, 130], 16, 2, 256, id="qwen3.6", marks=GPU),
]
WINDOWED = [
    pytest.param(
        [5, 700, 1300], [5, 40, 70], 4, 1, 256, 512, id="gemma3-270m", marks=LONG_INTERPRETED
    ),
    pytest.param([77, 600, 230], [77, 3, 230], 3, 1, 64, 100, id="less-than-a-tile"),
    pytest.param([200], [200], 4, 2, 64, 1, id="itself", marks=LONG_INTERPRETED),
    pytest.param([330, 260], [330, 3], 2, 1, 64, -100, id="chunks"),
    pytest.param([9000, 4096], [3000, 65], 40, 8, 128, -2048, id="chunks of llama 4", marks=GPU),
    pytest.param(
        [1, 1000, 4097, 2048], [1, 1000, 33, 2048], 8, 4, 256, 1024, id="gemma3-4b", marks=GPU
    ),
    pytest.param([3000, 1500], [3000, 65], 32, 16, 128, 1024, id="gemma3-27b", marks=GPU),
]


def bounds(counts: list[int]) -> torch.Tensor:
    return torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()])


@pytest.mark.parametrize(("block_size", "fp8"), formats(16, 64, 128))
@pytest.mark.parametrize(("seq_lens", "counts", "num_q", "num_kv", "head_dim"), CASES)
def test_prefill_attention_agrees_with_float64(
    seq_lens: list[int],
    counts: list[int],
    num_q: int,
    num_kv: int,
    head_dim: int,
    block_size: int,
    fp8: bool,
    generator: torch.Generator,
) -> None:
    batch = PagedBatch(seq_lens, num_q, num_kv, head_dim, block_size, generator, fp8=fp8)
    q = batch.queries(sum(counts))
    out = prefill(batch, q, counts)
    k, v = batch.wide_caches()
    twin = prefill_attention_twin(
        q.double(), k, v, bounds(counts), batch.lengths(), batch.table_rows, batch.block_tables
    )
    for first, end in zip(bounds(counts)[:-1], bounds(counts)[1:], strict=True):
        assert relative_error(out[first:end], twin[first:end]) < 5e-3


@pytest.mark.parametrize("fp8", [False, pytest.param(True, marks=LONG)], ids=["bf16", "fp8"])
@pytest.mark.parametrize(("seq_lens", "counts", "num_q", "num_kv", "head_dim"), CASES)
def test_a_recomputed_row_has_the_bits_of_its_decode_step(
    seq_lens: list[int],
    counts: list[int],
    num_q: int,
    num_kv: int,
    head_dim: int,
    fp8: bool,
    generator: torch.Generator,
) -> None:
    batch = PagedBatch(seq_lens, num_q, num_kv, head_dim, 64, generator, fp8=fp8)
    q = batch.queries(sum(counts))
    together = prefill(batch, q, counts)
    starts = bounds(counts).tolist()
    full_lens = list(batch.seq_lens)
    for back in (0, 1, 2, 60) if q.is_cuda else (0, 60):
        rows = [i for i, count in enumerate(counts) if count > back]
        if not rows:
            continue
        batch.seq_lens = [n - back if i in rows else n for i, n in enumerate(full_lens)]
        last = torch.tensor(
            [starts[i + 1] - 1 - (back if i in rows else 0) for i in range(len(counts))]
        )
        expected = decode(batch, q[last.to(q.device)])
        for i in rows:
            assert same_bits(expected[i], together[last[i]]), (full_lens[i], back)
    batch.seq_lens = full_lens


@pytest.mark.parametrize(("seq_lens", "counts", "num_q", "num_kv", "head_dim"), CASES)
def test_chunks_of_any_size_give_the_same_bits(
    seq_lens: list[int],
    counts: list[int],
    num_q: int,
    num_kv: int,
    head_dim: int,
    generator: torch.Generator,
) -> None:
    batch = PagedBatch(seq_lens, num_q, num_kv, head_dim, 64, generator)
    q = batch.queries(sum(counts))
    together = prefill(batch, q, counts)
    starts = bounds(counts).tolist()
    heads = [max(count * 3 // 7, 1) for count in counts]
    first = torch.cat([torch.arange(s, s + h) for s, h in zip(starts, heads, strict=False)]).to(
        q.device
    )
    begun = [n - c + h for n, c, h in zip(seq_lens, counts, heads, strict=True)]
    assert same_bits(prefill(batch, q[first], heads, begun), together[first])
    rest = [c - h for c, h in zip(counts, heads, strict=True)]
    second = torch.cat(
        [torch.arange(s + h, s + c) for s, h, c in zip(starts, heads, counts, strict=False)]
    )
    assert same_bits(prefill(batch, q[second.to(q.device)], rest), together[second.to(q.device)])


@pytest.mark.parametrize("fp8", [False, pytest.param(True, marks=GPU)], ids=["bf16", "fp8"])
@pytest.mark.parametrize(("seq_lens", "counts", "num_q", "num_kv", "head_dim", "window"), WINDOWED)
def test_a_window_hides_all_keys_before_it_in_any_chunk_and_in_decode(
    seq_lens: list[int],
    counts: list[int],
    num_q: int,
    num_kv: int,
    head_dim: int,
    window: int,
    fp8: bool,
    generator: torch.Generator,
) -> None:
    batch = PagedBatch(seq_lens, num_q, num_kv, head_dim, 64, generator, fp8=fp8)
    q = batch.queries(sum(counts))
    options = {"window": window, "scale": 168**-0.5}
    out = prefill(batch, q, counts, **options)
    tables = bounds(counts), batch.lengths(), batch.table_rows, batch.block_tables
    twin = prefill_attention_twin(q.double(), *batch.wide_caches(), *tables, **options)
    for first, end in zip(bounds(counts)[:-1], bounds(counts)[1:], strict=True):
        assert relative_error(out[first:end], twin[first:end]) < 5e-3
    last = (bounds(counts)[1:] - 1).to(q.device)
    assert same_bits(decode(batch, q[last], **options), out[last])
    rest = [count - count // 2 for count in counts]
    starts = (bounds(counts)[1:] - torch.tensor(rest)).tolist()
    second = torch.cat([torch.arange(s, s + n) for s, n in zip(starts, rest, strict=True)]).to(
        q.device
    )
    assert same_bits(prefill(batch, q[second], rest, **options), out[second])


def test_a_window_reads_no_tile_that_lies_before_that_of_all_rows(
    generator: torch.Generator,
) -> None:
    """Not even numbers that are none are met there, which would leave no number of a row."""
    batch = PagedBatch([1100], 2, 1, 64, 64, generator)
    q = batch.queries(20)
    expected = prefill(batch, q, [20], window=300)
    unread = (1100 - 19 - 300) // 128 * 2
    batch.k_cache[batch.block_tables[batch.table_rows[0], :unread].long()] = float("nan")
    assert torch.equal(prefill(batch, q, [20], window=300), expected)


@pytest.mark.parametrize(
    ("seq_lens", "counts", "num_q", "num_kv", "head_dim", "window"),
    [
        pytest.param([514], [2], 3, 1, 64, 0, id="all keys"),
        pytest.param([130], [3], 4, 2, 64, 40, id="a window", marks=LONG_INTERPRETED),
        *(
            pytest.param(
                [1, 127, 128, 129, 1000, 4097, 513, 512],
                [1, 127, 128, 129, 300, 33, 4, 1],
                *(64, 8, 64, window),
                marks=GPU,
                id=f"gpt-oss, {window}",
            )
            for window in (0, 128)
        ),
    ],
)
@pytest.mark.parametrize("fp8", [False, pytest.param(True, marks=GPU)], ids=["bf16", "fp8"])
def test_a_sink_takes_its_share_once_whatever_the_chunks_and_splits(
    seq_lens: list[int],
    counts: list[int],
    num_q: int,
    num_kv: int,
    head_dim: int,
    window: int,
    fp8: bool,
    generator: torch.Generator,
) -> None:
    batch = PagedBatch(seq_lens, num_q, num_kv, head_dim, 64, generator, fp8=fp8)
    q = batch.queries(sum(counts))
    # From one that counts nothing to one that counts more than all keys.
    sinks = torch.linspace(-9, 60, num_q, device=q.device)
    options = {"window": window, "sinks": sinks}
    out = prefill(batch, q, counts, **options)
    tables = bounds(counts), batch.lengths(), batch.table_rows, batch.block_tables
    twin = prefill_attention_twin(q.double(), *batch.wide_caches(), *tables, **options)
    for first, end in zip(bounds(counts)[:-1], bounds(counts)[1:], strict=True):
        assert relative_error(out[first:end], twin[first:end]) < 5e-3
    last = (bounds(counts)[1:] - 1).to(q.device)
    decoded = decode(batch, q[last], **options)
    assert same_bits(decoded, out[last])
    if not q.is_cuda:
        return
    for i in range(len(counts)):
        assert same_bits(decode(batch, q[last], [i], **options)[0], decoded[i]), seq_lens[i]
    if not window:
        assert same_bits(decode(batch, q[last], fold=True, **options), decoded)
        assert same_bits(decode(batch, q[last], share=True, **options), decoded)
