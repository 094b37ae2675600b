from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from headwater.kernels.attention import decode_attention, hopper_decode_splits
from headwater.kernels.attention.decode_folds import (
    RESIDENT_PROGRAMS,
    RESIDENT_PROGRAMS_OF_FEW,
    plan_folds,
)
from headwater.kernels.attention.decode_plan import FEW_ROWS, DecodePlan, plan_decode
from headwater.kernels.attention.online_softmax import SPLIT
from tests.kernels.paging import GPU, LONG, PagedBatch, decode

INTERPRETED = [513, 1100, 512, 1, 1536, 1025, 40, 1024]
HEADS = [
    pytest.param(4, 2, 64, id="group-2"),
    pytest.param(32, 8, 128, id="qwen3-8b", marks=GPU),
    pytest.param(16, 8, 128, id="qwen3-0.6b", marks=GPU),
]


def ints(values: list[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def planned(
    seq_lens: list[int],
    device: torch.device,
    num_kv_heads: int = 2,
    *,
    fold: bool = True,
    is_beside: bool = False,
) -> DecodePlan:
    plan = DecodePlan.allocate(
        max_rows=len(seq_lens),
        max_seq_len=max(*seq_lens, SPLIT),
        num_q_heads=2 * num_kv_heads,
        num_kv_heads=num_kv_heads,
        head_dim=64,
        device=device,
        fold=fold,
    )
    plan = plan.beside() if is_beside else plan
    rows = ints(list(range(len(seq_lens))), device)
    plan_decode(
        plan, ints(seq_lens, device), rows, rows[:, None].repeat(1, 1 << 10), 64, share=False
    )
    return plan


def test_programs_are_as_many_as_attention_launches() -> None:
    assert decode_attention.RESIDENT_PROGRAMS == RESIDENT_PROGRAMS
    assert hopper_decode_splits.RESIDENT_PROGRAMS == RESIDENT_PROGRAMS_OF_FEW


@pytest.mark.parametrize(
    ("num_splits", "walks_list", "expected"),
    [
        # Six programs compute two heads: a wave is three rows. Of whole rows a program's share is
        # seven splits.
        pytest.param([7, 7, 7], False, [7, 7, 7], id="whole rows"),
        pytest.param([4, 4, 4, 4, 5], False, [4, 4, 2, 2, 5], id="a second wave"),
        pytest.param([4, 4, 4, 4, 5], True, [4, 4, 3, 3, 4], id="equal folds of a second wave"),
        pytest.param(
            [2, 3, 9, 3], True, [1, 3, 3, 3], id="a second wave that few programs would have"
        ),
        pytest.param([20, 1], False, [7, 1], id="a long row"),
        pytest.param([20, 1], True, [1, 1], id="a long row that few programs would have"),
        pytest.param([1.3] * 6, False, [2] * 6, id="last splits that are not whole"),
        pytest.param([1] * 21, False, [1] * 21, id="single splits"),
        pytest.param([1, 0, 2], False, [1, 1, 1], id="less work than programs"),
    ],
)
def test_folds_of_all_waves_are_no_longer_than_a_programs_share(
    num_splits: list[float], walks_list: bool, expected: list[int], device: torch.device
) -> None:
    folded = torch.zeros(len(num_splits), dtype=torch.int32, device=device)
    lengths = ints([int(n * SPLIT) for n in num_splits], device)
    plan_folds(lengths, folded, num_kv_heads=2, num_programs=6, walks_list=walks_list)
    assert folded.tolist() == expected


@pytest.mark.parametrize("num_rows", [8, 40, pytest.param(200, marks=GPU)])
def test_every_split_is_folded_or_an_item_of_its_own(
    num_rows: int, generator: torch.Generator
) -> None:
    device = generator.device
    seq_lens = torch.randint(0, 5000, (num_rows,), generator=generator, device=device).tolist()
    plan = planned(seq_lens, device)
    assert plan.folded is not None
    folded = plan.folded.tolist()
    counts = plan.counts.tolist()
    listed = plan.items[: counts[0]].tolist() + plan.tails[: counts[1]].tolist()
    found = Counter[tuple[int, int]]()
    for item in listed:
        row = item >> 16
        split = item & 0xFFFF
        found.update(
            (row, i) for i in range(split, max(split + 1, folded[row] if split == 0 else 0))
        )
    whole = {(row, i) for row, length in enumerate(seq_lens) for i in range(-(-length // SPLIT))}
    assert found == Counter(whole)
    lengths = [
        folded[item >> 16] if item & 0xFFFF == 0 else 1 for item in plan.items[: counts[0]].tolist()
    ]
    assert lengths == sorted(lengths, reverse=True)


def test_rows_of_one_split_come_in_the_order_of_plans_without_folds(
    generator: torch.Generator,
) -> None:
    device = generator.device
    seq_lens = torch.randint(0, SPLIT, (40,), generator=generator, device=device).tolist()
    lists = []
    for fold in (False, True):
        plan = planned(seq_lens, device, fold=fold)
        lists.append((plan.counts.tolist(), plan.tails.tolist(), plan.first_partials.tolist()))
    assert lists[0] == lists[1]


def test_a_plan_beside_another_has_folds_of_its_own(device: torch.device) -> None:
    assert (folded := planned([4 * SPLIT] * 8, device, is_beside=True).folded) is not None
    assert folded.max() > 1
    assert planned([4 * SPLIT] * 8, device).without_folds().beside().folded is None


def test_plans_without_lists_and_of_too_many_rows_fold_nothing(device: torch.device) -> None:
    sizes: dict[str, Any] = {
        "max_seq_len": SPLIT,
        "num_q_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 64,
    }
    folds = {
        n: DecodePlan.allocate(max_rows=n, device=device, fold=True, **sizes).folded
        for n in (1, 4, 5, 4096, 4097)
    }
    assert [n for n, folded in folds.items() if folded is not None] == [5, 4096]


@pytest.mark.parametrize("block_size", [64, pytest.param(16, marks=LONG)])
@pytest.mark.parametrize("fp8", [False, pytest.param(True, marks=LONG)], ids=["bf16", "fp8"])
@pytest.mark.parametrize(("num_q", "num_kv", "head_dim"), HEADS)
def test_folds_change_no_bit(
    num_q: int, num_kv: int, head_dim: int, fp8: bool, block_size: int, generator: torch.Generator
) -> None:
    seq_lens = INTERPRETED * (25 if generator.device.type == "cuda" else 1)
    folded = planned(seq_lens, generator.device, num_kv).folded
    assert folded is not None
    assert folded.max() > 1
    batch = PagedBatch(seq_lens, num_q, num_kv, head_dim, block_size, generator, fp8=fp8)
    q = batch.queries(len(seq_lens))
    assert torch.equal(decode(batch, q, fold=True, layers=2), decode(batch, q))


@pytest.mark.gpu
@pytest.mark.parametrize("num_q", [32, 16])
def test_folds_of_some_dozen_rows_change_no_bit(num_q: int, generator: torch.Generator) -> None:
    seq_lens = torch.randint(
        1, 4000, (FEW_ROWS[-1],), generator=generator, device=generator.device
    ).tolist()
    batch = PagedBatch(seq_lens, num_q, 8, 128, 64, generator)
    q = batch.queries(len(seq_lens))
    assert torch.equal(decode(batch, q, fold=True, layers=3), decode(batch, q))


def merged(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """`online_softmax.merge_states` of states [rows, 2 + D] of a maximum, a sum and values, in
    float32 with fused products and sums."""
    m = torch.maximum(first[:, :1], second[:, :1])
    shift = torch.where(m.isneginf(), 0.0, m)
    old = torch.exp2(first[:, :1] - shift)
    new = torch.exp2(second[:, :1] - shift)
    rest = (first[:, 1:].double() * old.double() + (second[:, 1:] * new).double()).float()
    return torch.cat([m, rest], dim=1)


def test_a_merge_that_goes_on_from_folded_splits_has_its_bits_and_one_of_later_folds_has_others() -> (
    None
):
    generator = torch.Generator().manual_seed(0)
    empty = torch.tensor([float("-inf"), *[0.0] * 65]).expand(500, -1)
    splits = [torch.randn(500, 66, generator=generator) for _ in range(6)]
    for split in splits:
        # References are multiples of eight; sums are positive.
        split[:, :2] = torch.stack([(split[:, 0] * 2).floor() * 8, split[:, 1].abs() * 500], dim=1)
    states = [empty]
    for split in splits:
        states.append(merged(states[-1], split))
    for num_folded in range(1, 7):
        stored = empty
        for split in splits[:num_folded]:
            stored = merged(stored, split)
        for split in splits[num_folded:]:
            stored = merged(stored, split)
        assert torch.equal(stored, states[-1])
    assert not torch.equal(merged(splits[0], merged(splits[1], splits[2])), states[3])
