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


def batch_of(
    kind: str, block_size: int, generator: torch.Generator, *, fp8: bool = False
) -> PagedBatch:
    """Sequences that share their first keys, 1,100, 512, 600 or 0 of small ones, with the first
    one."""
    if kind == "few":
        seq_lens = [580, 530, 512, 20]
        shared = [512, 512, 500, 0]
        heads = (4, 2, 64)
    elif kind == "small":
        seq_lens = [1200, 1150, 512, 700, 1030, 20]
        shared = [1100, 1100, 512, 600, 0, 0]
        heads = (4, 2, 64)
    else:
        num_shared = 100
        seq_lens = [4200 + i for i in range(num_shared)] + [900, 512, 30_000, 2048, 5]
        shared = [4096] * num_shared + [600, 512, 4160, 0, 0]
        heads = (32, 8, 128)
    return PagedBatch(
        seq_lens,
        *heads,
        block_size,
        generator,
        share=tuple(n // block_size for n in shared),
        fp8=fp8,
    )


KINDS = ["small", pytest.param("large", marks=GPU)]
KINDS_OF_BITS = [
    "few",
    pytest.param("small", marks=LONG_INTERPRETED),
    pytest.param("large", marks=GPU),
]


@pytest.mark.parametrize(
    ("block_size", "fp8"),
    [
        pytest.param(16, False, id="16-bf16", marks=LONG),
        pytest.param(16, True, id="16-fp8", marks=LONG_INTERPRETED),
        *formats(64, 128),
    ],
)
@pytest.mark.parametrize("kind", KINDS_OF_BITS)
def test_sharing_changes_no_bit(
    kind: str, block_size: int, fp8: bool, generator: torch.Generator
) -> None:
    batch = batch_of(kind, block_size, generator, fp8=fp8)
    q = batch.queries(len(batch.seq_lens))
    shared = decode(batch, q, share=True)
    assert same_bits(shared, decode(batch, q))
    twin = decode_attention_twin(
        q.double(), *batch.wide_caches(), batch.lengths(), batch.table_rows, batch.block_tables
    )
    assert relative_error(shared, twin) < 5e-3


@pytest.mark.parametrize("kind", KINDS)
def test_the_plan_covers_every_split_once_and_reads_shared_ones_once(
    kind: str, generator: torch.Generator
) -> None:
    batch = batch_of(kind, 64, generator)
    plan = DecodePlan.allocate(
        max_rows=len(batch.seq_lens),
        max_seq_len=max(batch.seq_lens),
        num_q_heads=batch.num_q_heads,
        num_kv_heads=batch.num_kv_heads,
        head_dim=batch.head_dim,
        device=batch.device,
    )
    plan_decode(plan, batch.lengths(), batch.table_rows, batch.block_tables, 64, share=True)
    num_items, num_tails, num_shared, _ = plan.counts.tolist()
    alone = [
        (item >> 16, item & 0xFFFF)
        for item in plan.items[:num_items].tolist() + plan.tails[:num_tails].tolist()
    ]
    together = [
        (row, split)
        for split, rows in zip(
            plan.shared_splits[:num_shared].tolist(), plan.shared_rows.tolist(), strict=False
        )
        for row in rows
        if row >= 0
    ]
    wanted = [(row, split) for row, n in enumerate(batch.seq_lens) for split in range(-(-n // 512))]
    assert sorted(alone + together) == wanted
    if kind == "small":
        assert sorted(together) == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (3, 0)]
    else:
        # 102 rows share split 0, 101 shares splits 1 to 7.
        assert num_shared == 8 * -(-101 // plan.rows_per_tile)
