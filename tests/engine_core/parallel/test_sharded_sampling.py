"""Draws from parts of a vocabulary, beside draws from all of it: the same tokens."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from headwater.engine_core.layers.sharded_sampling import ShardedSampling
from headwater.engine_core.parallel.memory_group import MemoryGroup, create_group
from headwater.engine_core.platforms.cpu_sampling import CpuSampling
from headwater.engine_core.shards import Shard
from headwater.kernels.filtered_sample import Filters
from headwater.kernels.sample import Draws

NUM_ROWS = 24
OPERATIONS = CpuSampling()


class CountedGroup(MemoryGroup):
    """Adds up the elements that this rank gathers."""

    num_joined = 0

    def join(self, x: torch.Tensor) -> torch.Tensor:
        self.num_joined += x.numel()
        return super().join(x)


@pytest.fixture(params=[2, 3])
def groups(request: pytest.FixtureRequest) -> Iterator[list[CountedGroup]]:
    made = [CountedGroup(rank, end) for rank, end in enumerate(create_group(request.param))]
    yield made
    for group in made:
        group.close()


def draws() -> Draws:
    return Draws(
        temperatures=torch.tensor([0.0, 0.3, 1.0, 5.0]).repeat(NUM_ROWS // 4),
        seeds=torch.arange(NUM_ROWS) * 7919 - 3,
        choice_indices=torch.zeros(NUM_ROWS, dtype=torch.int32),
        output_indices=torch.arange(NUM_ROWS, dtype=torch.int32),
    )


def parts(logits: torch.Tensor, groups: list[CountedGroup]) -> list[tuple[ShardedSampling, torch.Tensor]]:
    vocab_size, found = logits.shape[1], []
    for group in groups:
        shard = Shard(group.index, group.size)
        own = shard.vocabulary(vocab_size)
        sampling = ShardedSampling(OPERATIONS, OPERATIONS, shard, vocab_size, group)
        found.append((sampling, logits[:, own.start : own.stop]))
    return found


@pytest.mark.parametrize("vocab_size", [512, 1000, 40_001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_plain_draws_are_those_of_whole_rows_and_gather_a_token_of_each_rank(
    vocab_size: int, dtype: torch.dtype, groups: list[CountedGroup]
) -> None:
    torch.manual_seed(vocab_size)
    logits = torch.randn(NUM_ROWS, vocab_size).mul(4).to(dtype)
    # Equal scores in every part: the first token counts.
    logits[0] = 1.0
    logits[4, [5, vocab_size - 1]] = 40.0
    expected = OPERATIONS.draw(logits, draws())
    with ThreadPoolExecutor(len(groups)) as pool:
        for tokens in pool.map(lambda part: part[0].draw(part[1], draws()), parts(logits, groups)):
            assert torch.equal(tokens, expected)
    assert expected[[0, 4]].tolist() == [0, 5]
    assert [group.num_joined for group in groups] == [2 * NUM_ROWS] * len(groups)


def test_masks_that_leave_some_parts_nothing_are_kept(groups: list[CountedGroup]) -> None:
    torch.manual_seed(1)
    logits, masks = torch.randn(NUM_ROWS, 1000).mul(4), torch.zeros(NUM_ROWS, 32, dtype=torch.int32)
    for row in range(NUM_ROWS):
        masks[row, row % 31] = 1 << (row % 30)
        masks[row, (7 * row) % 31] |= 6
    expected = OPERATIONS.draw(logits, draws(), masks)
    with ThreadPoolExecutor(len(groups)) as pool:
        for tokens in pool.map(lambda part: part[0].draw(part[1], draws(), masks), parts(logits, groups)):
            assert torch.equal(tokens, expected)


def test_filtered_draws_and_log_probabilities_are_to_the_bit_those_of_whole_rows(groups: list[CountedGroup]) -> None:
    torch.manual_seed(2)
    logits, hot = torch.randn(NUM_ROWS, 1000).mul(4), replace(draws(), temperatures=torch.ones(NUM_ROWS))
    filters = Filters(
        top_ks=torch.full((NUM_ROWS,), 40, dtype=torch.int32),
        top_ps=torch.full((NUM_ROWS,), 0.9),
        min_ps=torch.full((NUM_ROWS,), 0.01),
    )
    ids = torch.arange(NUM_ROWS, dtype=torch.int32)
    expected = OPERATIONS.draw_filtered(logits, hot, filters), OPERATIONS.logprobs(logits, ids, 3)
    with ThreadPoolExecutor(len(groups)) as pool:
        for sampling, (tokens, scores) in zip(
            parts(logits, groups),
            pool.map(
                lambda part: (part[0].draw_filtered(part[1], hot, filters), part[0].logprobs(part[1], ids, 3)),
                parts(logits, groups),
            ),
            strict=True,
        ):
            assert torch.equal(tokens, expected[0])
            assert all(torch.equal(own, other) for own, other in zip(scores, expected[1], strict=True))
            assert sampling[0].whole(logits) is logits
