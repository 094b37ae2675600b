from __future__ import annotations

import pytest
import torch

from headwater.kernels.attention.decode_attention import decode_attention_twin
from headwater.kernels.attention.decode_plan import DecodePlan, plan_decode
from tests.kernels.paging import (
    GPU,
    LONG,
    LONG_INTERPRETED,
    PagedBatch,
    decode,
    formats,
    relative_error,
    same_bits,
)

BOUND = 5e-3
"""Weights are rounded to bfloat16 before they meet the values, and so is the output: 2 to 4e-3."""
SMALL = [1, 64, 511, 512, 513, 1100]
LARGE = [1, 3, 511, 512, 513, 1024, 1025, 4097, 30_000, 700, 64, 65, 31, 32, 33, 95, 97, 129]
"""As many as a GPU computes another way than a single row, or the many below."""
HEADS = [
    pytest.param(4, 2, 64, id="group-2"),
    pytest.param(3, 1, 128, id="group-3", marks=LONG_INTERPRETED),
]
GPU_HEADS = [
    pytest.param(32, 8, 128, id="qwen3-8b", marks=GPU),
    pytest.param(16, 8, 128, id="qwen3-0.6b", marks=GPU),
    pytest.param(9, 3, 64, id="smollm2", marks=GPU),
    pytest.param(28, 4, 128, id="group-7", marks=GPU),
    pytest.param(16, 2, 256, id="qwen3.5-35b-a3b", marks=GPU),
]
WINDOWED = [
    pytest.param(4, 1, 256, 512, id="gemma3-270m", marks=LONG_INTERPRETED),
    pytest.param(4, 2, 64, 100, id="less-than-a-tile"),
    pytest.param(4, 2, 64, 1, id="itself", marks=LONG_INTERPRETED),
    pytest.param(4, 2, 64, -200, id="chunks"),
    pytest.param(40, 8, 128, -2048, id="chunks of llama 4", marks=GPU),
    pytest.param(8, 4, 256, 1024, id="gemma3-4b", marks=GPU),
    pytest.param(32, 16, 128, 1024, id="gemma3-27b", marks=GPU),
]


def lengths(device: torch.device) -> list[int]:
    return LARGE if device.type == "cuda" else SMALL


@pytest.mark.parametrize(("block_size", "fp8"), formats(16, 32, 64, 128))
@pytest.mark.parametrize(
    ("num_q", "num_kv", "head_dim"),
    [HEADS[0], pytest.param(4, 1, 256, id="gemma3-270m", marks=LONG_INTERPRETED), *GPU_HEADS],
)
def test_decode_attention_agrees_with_float64(
    num_q: int, num_kv: int, head_dim: int, block_size: int, fp8: bool, generator: torch.Generator
) -> None:
    batch = PagedBatch(
        lengths(generator.device), num_q, num_kv, head_dim, block_size, generator, fp8=fp8
    )
    q = batch.queries(len(batch.seq_lens))
    twin = decode_attention_twin(
        q.double(), *batch.wide_caches(), batch.lengths(), batch.table_rows, batch.block_tables
    )
    out = decode(batch, q)
    for i, length in enumerate(batch.seq_lens):
        assert relative_error(out[i], twin[i]) < BOUND, length


@pytest.mark.parametrize(("num_q", "num_kv", "head_dim"), [HEADS[1], *GPU_HEADS])
def test_a_sequence_has_the_same_bits_alone(
    num_q: int, num_kv: int, head_dim: int, generator: torch.Generator
) -> None:
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
        1,
        3000 if on_gpu else 600,
        (90 if on_gpu else 3,),
        generator=generator,
        device=generator.device,
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


@pytest.mark.parametrize("fp8", [False, pytest.param(True, marks=GPU)], ids=["bf16", "fp8"])
@pytest.mark.parametrize(("num_q", "num_kv", "head_dim", "window"), WINDOWED)
def test_a_window_hides_all_keys_before_it_from_a_few_rows_and_from_many(
    num_q: int, num_kv: int, head_dim: int, window: int, fp8: bool, generator: torch.Generator
) -> None:
    batch = PagedBatch(lengths(generator.device), num_q, num_kv, head_dim, 64, generator, fp8=fp8)
    q = batch.queries(len(batch.seq_lens))
    options = {"window": window, "scale": 168**-0.5}
    tables = batch.lengths(), batch.table_rows, batch.block_tables
    twin = decode_attention_twin(q.double(), *batch.wide_caches(), *tables, **options)
    out = decode(batch, q, layers=2, **options)
    for i, length in enumerate(batch.seq_lens):
        assert relative_error(out[i], twin[i]) < BOUND, length
    for i in range(0, len(q), 3):
        assert same_bits(decode(batch, q, [i], **options)[0], out[i]), batch.seq_lens[i]


@pytest.mark.parametrize(
    ("num_rows", "head_dim"),
    [
        (1, 64),
        pytest.param(5, 64, marks=LONG_INTERPRETED),
        pytest.param(5, 256, id="wide", marks=GPU),
    ],
)
def test_a_window_reads_no_tile_that_lies_wholly_before_it(
    num_rows: int, head_dim: int, generator: torch.Generator
) -> None:
    """Not even numbers that are none are met there, which would leave no number of a row."""
    batch = PagedBatch([900] * num_rows, 2, 1, head_dim, 64, generator)
    q = batch.queries(num_rows)
    expected = decode(batch, q, window=300)
    for table_row in batch.table_rows:
        batch.k_cache[batch.block_tables[table_row, : (900 - 300) // 128 * 2].long()] = float("nan")
    assert torch.equal(decode(batch, q, window=300), expected)


@pytest.mark.parametrize(("window", "items"), [(0, [0, 1]), (2000, [0, 1]), (512, [1]), (70, [])])
def test_splits_before_a_window_are_no_work(
    window: int, items: list[int], generator: torch.Generator
) -> None:
    device = generator.device
    plan = DecodePlan.allocate(
        max_rows=8, max_seq_len=2048, num_q_heads=4, num_kv_heads=2, head_dim=64, device=device
    )
    ints = {"dtype": torch.int32, "device": device}
    tables = torch.arange(5, **ints), torch.arange(5 * 32, **ints).view(5, 32)
    plan_decode(
        plan, torch.tensor([0, 1100, 0, 0, 0], **ints), *tables, 64, share=False, window=window
    )
    assert sorted((plan.items[: plan.counts[0]] & 0xFFFF).tolist()) == items
    assert (plan.tails[: plan.counts[1]] & 0xFFFF).tolist() == [2]
