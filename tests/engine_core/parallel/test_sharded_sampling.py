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
from headwater.engine_core.weights.shards import Shard
from headwater.kernels.sampling.filtered_sample import Filters, filtered_sample_twin
from headwater.kernels.sampling.logprobs import logprobs_twin
from headwater.kernels.sampling.sample import Draws

NUM_ROWS = 16
OPERATIONS = CpuSampling()


class CountedGroup(MemoryGroup):
    """Adds up the elements that this rank gathers, and their bytes."""

    num_joined = num_bytes = 0

    def join(self, x: torch.Tensor) -> torch.Tensor:
        self.num_joined += x.numel()
        self.num_bytes += x.nbytes
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


def parts(
    logits: torch.Tensor, groups: list[CountedGroup]
) -> list[tuple[ShardedSampling, torch.Tensor]]:
    vocab_size = logits.shape[1]
    found = []
    for group in groups:
        shard = Shard(group.index, group.size)
        own = shard.vocabulary(vocab_size)
        sampling = ShardedSampling(OPERATIONS, OPERATIONS, shard, vocab_size, group)
        found.append((sampling, logits[:, own.start : own.stop]))
    return found


@pytest.mark.parametrize("vocab_size", [512, 1000, 20_001])
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
    logits = torch.randn(NUM_ROWS, 1000).mul(4)
    masks = torch.zeros(NUM_ROWS, 32, dtype=torch.int32)
    for row in range(NUM_ROWS):
        masks[row, row % 31] = 1 << (row % 30)
        masks[row, (7 * row) % 31] |= 6
    expected = OPERATIONS.draw(logits, draws(), masks)
    with ThreadPoolExecutor(len(groups)) as pool:
        for tokens in pool.map(
            lambda part: part[0].draw(part[1], draws(), masks), parts(logits, groups)
        ):
            assert torch.equal(tokens, expected)


FILTERS = [
    (0, 0.9, 0.0),
    (0, 0.999, 0.0),
    (40, 1.0, 0.0),
    (40, 0.9, 0.01),
    (0, 1.0, 0.2),
    (700, 0.95, 0.0),
    (3, 0.5, 0.0),
    (0, 1.0, 1e-9),
]
"""top-k, top-p and min-p of rows, by turns."""


def filters_of(rows: list[tuple[int, float, float]]) -> Filters:
    top_ks, top_ps, min_ps = (torch.tensor(column) for column in zip(*rows, strict=True))
    return Filters(top_ks=top_ks.int(), top_ps=top_ps, min_ps=min_ps)


def hot() -> Draws:
    return replace(draws(), temperatures=torch.linspace(0.3, 2.0, NUM_ROWS))


@pytest.mark.parametrize("vocab_size", [300, 1000, 20_001])
@pytest.mark.parametrize("spread", [0.1, 4.0])
def test_filtered_draws_are_those_of_whole_rows_and_gather_few_candidates(
    vocab_size: int, spread: float, groups: list[CountedGroup]
) -> None:
    torch.manual_seed(vocab_size)
    logits = torch.randn(NUM_ROWS, vocab_size).mul(spread)
    filters = filters_of(FILTERS * (NUM_ROWS // len(FILTERS)))
    # Of equals at a cut all are kept, on every rank.
    logits[2:4] = logits[2:4].round()
    expected = OPERATIONS.draw_filtered(logits, hot(), filters)
    assert torch.equal(expected, filtered_sample_twin(logits, hot(), filters))
    with ThreadPoolExecutor(len(groups)) as pool:
        for tokens in pool.map(
            lambda part: part[0].draw_filtered(part[1], hot(), filters), parts(logits, groups)
        ):
            assert torch.equal(tokens, expected)
    if vocab_size > 10_000:
        gathered = 4 * NUM_ROWS * vocab_size // len(groups)
        assert all(group.num_bytes < gathered / 4 for group in groups)


def test_a_small_top_k_gathers_its_candidates_alone(groups: list[CountedGroup]) -> None:
    logits = torch.randn(NUM_ROWS, 20_001)
    filters = filters_of([(20, 0.9, 0.0)] * NUM_ROWS)
    with ThreadPoolExecutor(len(groups)) as pool:
        list(
            pool.map(
                lambda part: part[0].draw_filtered(part[1], hot(), filters), parts(logits, groups)
            )
        )
    assert [group.num_bytes for group in groups] == [8 * 21 * NUM_ROWS] * len(groups)


def test_filtered_draws_under_masks_gather_no_logits(groups: list[CountedGroup]) -> None:
    torch.manual_seed(3)
    logits = torch.randn(NUM_ROWS, 1000).mul(4)
    masks = torch.zeros(NUM_ROWS, 32, dtype=torch.int32)
    masks[:, 1] = 0x0FF0
    masks[::2, 30] = 7
    filters = filters_of(FILTERS * (NUM_ROWS // len(FILTERS)))
    expected = OPERATIONS.draw_filtered(OPERATIONS.mask_tokens(logits, masks), hot(), filters)

    def draw(part: tuple[ShardedSampling, torch.Tensor]) -> torch.Tensor:
        masked = part[0].mask_tokens(part[1], masks)
        assert masked.shape == part[1].shape
        return part[0].draw_filtered(masked, hot(), filters)

    with ThreadPoolExecutor(len(groups)) as pool:
        for tokens in pool.map(draw, parts(logits, groups)):
            assert torch.equal(tokens, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("vocab_size", "num_top"), [(300, 0), (1000, 3), (20_001, 20)])
def test_log_probabilities_are_to_the_bit_those_of_whole_rows(
    vocab_size: int, num_top: int, dtype: torch.dtype, groups: list[CountedGroup]
) -> None:
    torch.manual_seed(2)
    # Rounded coarsely, so that there are ties among the likeliest.
    logits = torch.randn(NUM_ROWS, vocab_size).mul(4).round().to(dtype)
    logits[:, 7] = -torch.inf
    ids = torch.arange(NUM_ROWS, dtype=torch.int32) * 4
    expected = OPERATIONS.logprobs(logits, ids, num_top)
    for own, exact in zip(expected, logprobs_twin(logits.double(), ids, num_top), strict=True):
        torch.testing.assert_close(own.double(), exact.double(), rtol=0, atol=1e-5)
    with ThreadPoolExecutor(len(groups)) as pool:
        for found in pool.map(
            lambda part: part[0].logprobs(part[1], ids, num_top), parts(logits, groups)
        ):
            assert all(torch.equal(own, other) for own, other in zip(found, expected, strict=True))
    assert [group.num_bytes for group in groups] == [(16 + 8 * num_top) * NUM_ROWS] * len(groups)


def test_logits_of_all_tokens_are_not_gathered_again(groups: list[CountedGroup]) -> None:
    logits = torch.randn(NUM_ROWS, 1000)
    for sampling, _ in parts(logits, groups):
        assert sampling.whole(logits) is logits
        assert torch.equal(sampling.draw(logits, draws()), OPERATIONS.draw(logits, draws()))
    assert all(group.num_joined == 0 for group in groups)
