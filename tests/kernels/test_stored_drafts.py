from __future__ import annotations

import torch

from headwater.kernels.rows.draft_rows import StepWords
from headwater.kernels.rows.stored_drafts import (
    find_shifts,
    keep_states,
    shift_words,
    store_drafts,
    store_drafts_and_advance,
)


def ints(values: list[int] | list[list[int]], generator: torch.Generator) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=generator.device)


def test_words_of_another_step_move_as_far_as_rows_are_behind(generator: torch.Generator) -> None:
    """Rows 4 and 2 follow, 3 and 0 tokens behind what was planned; row 1 does not, whatever is
    known of it."""
    steps = ints(
        [[4, 1, 2, -1], [0, 2, 3, 0], [1, 0, 2, 0], [1, 0, 1, 0], [0, 2, 3, -1]], generator
    )
    known = ints([-7, 90, 31, -7, 18, -7], generator)
    positions = ints([20, 21, 8, 30, 31, 32, 0], generator)
    shifts = ints([9] * 6, generator)
    find_shifts(steps, known, positions, shifts)
    assert shifts.tolist() == [9, 0, 0, 9, -3, 9]
    shifts[2] = -2
    rows = ints([4, 4, 2, 1, -1], generator)
    at = ints([19, 20, 29, 8, 0], generator)
    lens = ints([20, 21, 30, 0], generator)
    draws = ints([[4, 2, -1], [20, 29, 5], [7, 8, 5], [1, 2, 5]], generator)
    shift_words(shifts, StepWords(rows, at, lens, None, draws))
    assert rows.tolist() == [4, 4, 2, 1, -1]
    assert at.tolist() == [16, 17, 27, 8, 0]
    assert lens.tolist() == [17, 18, 28, 0], "padding stays padding"
    assert draws.tolist() == [[4, 2, -1], [17, 27, 5], [4, 6, 5], [1, 2, 5]]


def test_rows_go_on_behind_what_they_draft_until_none_is_left(generator: torch.Generator) -> None:
    table = torch.zeros(5, 20, dtype=torch.int32, device=generator.device)
    rows = ints([3, -1, 0], generator)
    at = ints([5, 0, 9], generator)
    left = ints([3, 0, 1], generator)
    outputs = ints([11, 0, 12], generator)
    store_drafts(rows, at, ints([41, 42, 43], generator), table, 500)
    assert (table[3, 6], table[0, 10]) == (41, 43)
    at += rows >= 0
    lens = ints([7, 0, 11], generator)
    store_drafts_and_advance(
        rows, at, ints([51, 52, 53], generator), table, 500, lens, outputs, left
    )
    assert rows.tolist() == [3, -1, -1]
    assert (at[0], lens.tolist(), outputs[0], left.tolist()) == (7, [8, 0, 0], 12, [2, 0, 0])
    store_drafts_and_advance(
        rows, at, ints([61, 62, 63], generator), table, 500, lens, outputs, left
    )
    store_drafts_and_advance(
        rows, at, ints([71, 72, 73], generator), table, 500, lens, outputs, left
    )
    assert (rows.tolist(), lens.tolist()) == ([-1] * 3, [0] * 3)
    assert table[3, 6:10].tolist() == [41, 51, 61, 71]
    assert table[0, 10:13].tolist() == [43, 53, 0]
    assert int((table != 0).sum()) == 6


def test_a_first_draft_stays_at_its_position_and_later_ones_go_a_place_further(
    generator: torch.Generator,
) -> None:
    table = torch.zeros(5, 20, dtype=torch.int32, device=generator.device)
    rows = ints([3, 0], generator)
    at = ints([5, 9], generator)
    left = ints([3, 1], generator)
    lens = ints([6, 10], generator)
    outputs = ints([2, 4], generator)
    words = lens, outputs, left
    store_drafts_and_advance(rows, at, ints([41, 42], generator), table, 500, *words, advance=0)
    assert (rows.tolist(), at[0], lens.tolist(), outputs[0]) == ([3, -1], 5, [6, 0], 3)
    store_drafts_and_advance(rows, at, ints([51, 52], generator), table, 500, *words, behind=2)
    assert (rows.tolist(), at[0], lens.tolist(), outputs[0]) == ([3, -1], 6, [7, 0], 4)
    store_drafts_and_advance(rows, at, ints([61, 62], generator), table, 500, *words, behind=2)
    assert (rows.tolist(), lens.tolist()) == ([-1, -1], [0, 0])
    assert table[3, 6:10].tolist() == [41, 51, 61, 0]
    assert table[0, 10:12].tolist() == [42, 0]


def test_states_before_last_known_tokens_are_kept(generator: torch.Generator) -> None:
    """Row 4 gained two of its three tokens, row 1 is a chunk that is sampled after, row 2 one that
    is not."""
    steps = ints(
        [[4, 1, 2, -1], [0, 3, 7, 0], [2, 0, 0, 0], [1, 0, 0, 0], [0, 3, -1, -1]], generator
    )
    positions = ints([30, 31, 32, 5, 6, 7, 8, 0, 1], generator)
    known = ints([0, 10, 99, 0, 33], generator)
    hidden = torch.randn(9, 1500, generator=generator, device=generator.device)
    states = torch.zeros(5, 1500, device=generator.device)
    keep_states(steps, known, positions, hidden, states)
    expected = torch.zeros_like(states)
    expected[4] = hidden[1]
    expected[1] = hidden[6]
    assert torch.equal(states, expected)


def test_what_is_no_token_becomes_one(generator: torch.Generator) -> None:
    table = torch.full((3, 4), 7, dtype=torch.int32, device=generator.device)
    drawn = ints([-1, 2**31 - 1, 499], generator)
    store_drafts(ints([0, 1, 2], generator), ints([0, 1, 2], generator), drawn, table, 500)
    assert (table[0, 1], table[1, 2], table[2, 3]) == (0, 499, 499)
