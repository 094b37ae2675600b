"""Tensors that ranks exchange through shared memory. Ranks are threads here, each with descriptors
of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from headwater.engine_core.parallel.memory_group import MemoryGroup, create_group
from headwater.engine_core.system.ring import PeerGone

Made = Callable[..., list[MemoryGroup]]


@pytest.fixture
def ranks() -> Iterator[Made]:
    made: list[MemoryGroup] = []

    def make(size: int, slot_bytes: int = 4096) -> list[MemoryGroup]:
        made.extend(
            MemoryGroup(rank, end) for rank, end in enumerate(create_group(size, slot_bytes))
        )
        return made[-size:]

    yield make
    for group in made:
        group.close()


def together(
    call: Callable[[MemoryGroup, torch.Tensor], torch.Tensor],
    groups: list[MemoryGroup],
    own: list[torch.Tensor],
) -> list[torch.Tensor]:
    with ThreadPoolExecutor(len(groups)) as pool:
        return list(pool.map(call, groups, own))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_a_sum_is_added_in_float32_in_the_order_of_the_ranks_and_rounded_once(
    size: int, dtype: torch.dtype
) -> None:
    groups = [MemoryGroup(rank, end) for rank, end in enumerate(create_group(size, 4096))]
    for num_rows in (1, 3, 40):
        own = [torch.randn(num_rows, 96).to(dtype) * 10**rank for rank in range(size)]
        expected = own[0].float().clone()
        for other in own[1:]:
            expected = expected + other.float()
        for found in together(MemoryGroup.sum, groups, own):
            assert torch.equal(found, expected.to(dtype))
    for group in groups:
        group.close()


def test_a_row_has_the_same_bits_in_any_batch_and_at_any_place(ranks: Made) -> None:
    groups = ranks(3, 1 << 10)
    own = [torch.randn(64, 100) for _ in groups]
    [whole, *_] = together(MemoryGroup.sum, groups, own)
    for rows in (slice(0, 1), slice(17, 18), slice(5, 40), slice(63, 64)):
        [some, *_] = together(MemoryGroup.sum, groups, [each[rows] for each in own])
        assert torch.equal(some, whole[rows])


@pytest.mark.parametrize(("rows", "width"), [(1, 5), (7, 33), (40, 100), (3, 2000)])
def test_parts_of_rows_stand_side_by_side(rows: int, width: int, ranks: Made) -> None:
    groups = ranks(3)
    own = [torch.randn(rows, width) for _ in groups]
    for joined in together(MemoryGroup.join, groups, own):
        assert torch.equal(joined, torch.cat(own, dim=1))


def test_no_rank_overtakes_another_by_more_than_its_two_slots(ranks: Made) -> None:
    groups = ranks(2, 64)

    def many(group: MemoryGroup, own: torch.Tensor) -> torch.Tensor:
        return torch.stack([group.sum(own + i) for i in range(2000)])

    for found in together(many, groups, [torch.zeros(16), torch.ones(16)]):
        assert torch.equal(found[:, 0], 2.0 * torch.arange(2000) + 1)


def test_nothing_to_exchange_is_no_exchange(ranks: Made) -> None:
    [group, _] = ranks(2)
    assert group.sum(torch.empty(0, 8)).shape == (0, 8)
    assert group.join(torch.empty(0, 8)).shape == (0, 16)


def test_a_rank_that_is_gone_ends_the_wait_of_the_others() -> None:
    [first, second] = [MemoryGroup(rank, end) for rank, end in enumerate(create_group(2))]
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(first.sum, torch.ones(4))
        second.close()
        with pytest.raises(PeerGone):
            waiting.result(60)
    with pytest.raises(PeerGone):
        first.sum(torch.ones(4))
    first.close()
