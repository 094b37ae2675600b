from __future__ import annotations

import pytest
import torch

from headwater.kernels.rows.step_rows import (
    PARAM_WORDS,
    load_draws,
    load_draws_twin,
    load_tokens,
    load_tokens_twin,
    scatter_words,
    store_tokens,
    store_tokens_twin,
)
from headwater.kernels.sampling.filtered_sample import Filters
from headwater.kernels.sampling.sample import Draws
from tests.kernels.paging import GPU, POISON

NUM_ROWS = 37
NUM_BLOCKS = 5
BLOCK_SIZE = 16
SIZES = [1, 3, 36, 257, pytest.param(8192, marks=GPU)]


def ints(generator: torch.Generator, low: int, high: int, *shape: int) -> torch.Tensor:
    return torch.randint(
        low, high, shape, generator=generator, device=generator.device, dtype=torch.int32
    )


def padded_rows(generator: torch.Generator, size: int) -> torch.Tensor:
    """Each row once at most, like those of a step; -1 for the others."""
    rows = torch.full((size,), -1, dtype=torch.int32, device=generator.device)
    count = min(size, NUM_ROWS) * 3 // 4 + 1
    rows[:count] = torch.randperm(NUM_ROWS, generator=generator, device=generator.device)[
        :count
    ].int()
    return rows


@pytest.mark.parametrize("num_updates", [1, 4, 300])
def test_scattered_words_stand_where_they_were_sent_and_nowhere_else(
    num_updates: int, generator: torch.Generator
) -> None:
    words = ints(generator, -9, 9, 1000)
    indices = torch.randperm(1000, generator=generator, device=words.device)[:num_updates].int()
    values = ints(generator, -(2**31), 2**31 - 1, num_updates)
    expected = words.clone()
    expected[indices.long()] = values
    scatter_words(words, indices, values)
    assert torch.equal(words, expected)


@pytest.mark.parametrize("num_groups", [1, 3])
@pytest.mark.parametrize("size", SIZES)
def test_tokens_and_slots_of_a_step_are_those_of_the_tables(
    size: int, num_groups: int, generator: torch.Generator
) -> None:
    rows = ints(generator, -1, NUM_ROWS, size)
    positions = ints(generator, 0, NUM_BLOCKS * BLOCK_SIZE, size)
    tokens = ints(generator, 0, 99, NUM_ROWS, 100)
    blocks = ints(generator, 0, 999, NUM_ROWS, num_groups * NUM_BLOCKS)
    token_ids = torch.full((size,), int(POISON), dtype=torch.int64, device=rows.device)
    slots = torch.full((num_groups, size), int(POISON), dtype=torch.int32, device=rows.device)
    tables = tokens, blocks, BLOCK_SIZE
    load_tokens(rows, positions, *tables, token_ids, slots)
    expected_ids, expected_slots = load_tokens_twin(rows, positions, *tables, num_groups)
    assert torch.equal(token_ids, expected_ids.long())
    assert torch.equal(slots, expected_slots)


@pytest.mark.parametrize("size", SIZES)
def test_sampling_state_is_unpacked_from_its_words_to_the_bit(
    size: int, generator: torch.Generator
) -> None:
    params = ints(generator, -(2**31), 2**31 - 1, NUM_ROWS, PARAM_WORDS)
    # Words that are read as floats are some.
    floats = torch.rand(NUM_ROWS, PARAM_WORDS, generator=generator, device=params.device)
    params[:, [3, 5, 6]] = floats.view(torch.int32)[:, [3, 5, 6]]
    rows = ints(generator, -1, NUM_ROWS, size)
    draws = Draws(
        temperatures=floats.new_full((size,), POISON),
        seeds=torch.zeros(size, dtype=torch.int64, device=rows.device),
        choice_indices=rows.clone(),
        output_indices=rows.clone(),
    )
    filters = Filters(
        top_ks=rows.clone(), top_ps=draws.temperatures.clone(), min_ps=draws.temperatures.clone()
    )
    load_draws(params, rows, draws, filters)
    loaded = (
        draws.temperatures,
        draws.seeds,
        draws.choice_indices,
        filters.top_ks,
        filters.top_ps,
        filters.min_ps,
    )
    for mine, twin in zip(loaded, load_draws_twin(params, rows), strict=True):
        assert torch.equal(mine, twin)


@pytest.mark.parametrize("size", [1, 36, 300])
def test_sampled_tokens_go_behind_their_rows(size: int, generator: torch.Generator) -> None:
    rows = padded_rows(generator, size)
    positions = ints(generator, 0, 98, size)
    token_ids = ints(generator, 0, 9, size)
    table = ints(generator, 0, 99, NUM_ROWS, 100)
    # The device writes into the host's memory, as it does for an engine.
    results = torch.full((3, 320), -7, dtype=torch.int32, pin_memory=rows.is_cuda)
    first = torch.tensor([320], dtype=torch.int32, device=rows.device)
    expected_table = table.clone()
    expected = results.to(rows.device).clone()
    store_tokens_twin(rows, positions, token_ids, expected_table, expected, first)
    store_tokens(rows, positions, token_ids, table, results, first)
    assert torch.equal(table, expected_table)
    assert torch.equal(results.to(rows.device), expected)
