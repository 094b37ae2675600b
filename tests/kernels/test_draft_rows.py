from __future__ import annotations

import pytest
import torch

from headwater.kernels.rows.draft_rows import (
    MAX_MATCH,
    StepWords,
    draft_rows,
    draft_twin,
    match_scratch,
    store_drafted,
)
from tests.kernels.paging import GPU

NUM_ROWS = 7
WIDTH = 3000
"""Of the tables."""


class Step:
    """A step of some rows of a table: what its words say, and how far each row really is."""

    def __init__(
        self,
        generator: torch.Generator,
        known: dict[int, int],
        most: list[int],
        behind: list[int],
        *,
        vocab_size: int = 3,
        has_ends: bool = False,
        draws_from: int = 0,
    ) -> None:
        """`known`: tokens by table row; `behind`: of how many of them the words do not know that
        they are missing, so many too many; −1: the row does not follow. Draws before `draws_from`
        are another's."""
        device = generator.device
        self.rows = list(known)
        self.known = known
        self.most = most
        self.behind = behind
        self.table = torch.randint(
            vocab_size, (NUM_ROWS, WIDTH), generator=generator, device=device
        ).int()
        self.num_tokens = sum(most) + len(most) + 5
        first = [sum(most[:i]) + i for i in range(len(most))]
        self.first = first
        self.draws_from = draws_from
        follows = [int(each >= 0) for each in behind]
        padding = [[-1] * 2, [0] * 2, [0] * 2, [0] * 2, [-1] * 2]
        columns = [self.rows, first, most, follows, [each + draws_from for each in first]]
        self.steps = self.ints(
            [[*some, *more] for some, more in zip(columns, padding, strict=True)], device
        )
        # Rows that follow are known here; the others' words are right.
        self.known_words = torch.full((NUM_ROWS,), -77, dtype=torch.int32, device=device)
        for i, row in enumerate(self.rows):
            if follows[i]:
                self.known_words[row] = known[row]
        rows = [-1] * self.num_tokens
        positions = [0] * self.num_tokens
        for i, row in enumerate(self.rows):
            for j in range(most[i] + 1):
                rows[first[i] + j] = row
                positions[first[i] + j] = known[row] - 1 + max(behind[i], 0) + j
        words = self.ints(
            [
                rows,
                positions,
                [p + 1 if r >= 0 else 0 for r, p in zip(rows, positions, strict=True)],
            ],
            device,
        )
        draws = torch.full((4, self.num_tokens + draws_from), -5, dtype=torch.int32, device=device)
        draws[0, draws_from:] = words[0]
        draws[1, draws_from:] = words[1]
        draws[2, draws_from:] = 1000 + words[1]
        end_lens = words[2].clone() if has_ends else None
        self.words = StepWords(*words, end_lens, draws)
        self.num_drafts = torch.full((len(self.rows) + 2,), -9, dtype=torch.int32, device=device)

    @staticmethod
    def ints(values: list[list[int]], device: torch.device) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    def draft(self) -> None:
        scratch = match_scratch(len(self.num_drafts), self.table.device)
        draft_rows(self.steps, self.known_words, self.table, self.words, scratch, self.num_drafts)


CASES = {
    "one row": ({3: 40}, [15], [-1]),
    "one that follows": ({2: 700}, [31], [9]),
    "several": ({0: 17, 5: 2500, 1: 1, 6: 33}, [3, 15, 4, 0], [2, -1, 0, 5]),
    "none may draft": ({4: 90, 2: 8}, [0, 0], [0, 7]),
}


@pytest.mark.parametrize("vocab_size", [2, 5, 1000])
@pytest.mark.parametrize("case", CASES)
def test_drafts_are_what_followed_the_longest_match(
    case: str, vocab_size: int, generator: torch.Generator
) -> None:
    known, most, behind = CASES[case]
    step = Step(
        generator,
        known,
        most,
        behind,
        vocab_size=vocab_size,
        has_ends=case == "several",
        draws_from=3,
    )
    before = step.table.clone()
    expected = step.table.clone()
    draws = step.words.draws.clone()
    words = step.words.rows.clone()
    step.draft()
    for i, row in enumerate(step.rows):
        n = known[row]
        drafts = draft_twin(before[row, :n].tolist(), most[i]) if most[i] else []
        assert step.num_drafts[i] == len(drafts)
        if drafts:
            expected[row, n : n + len(drafts)] = torch.tensor(drafts, dtype=torch.int32)
        untouched = not most[i] and behind[i] < 0
        assert untouched or step.known_words[row] == n
        for j in range(most[i] + 1):
            at = step.first[i] + j
            is_live = j <= len(drafts)
            position, length = (n - 1 + j, n + j) if is_live else (0, 0)
            assert step.words.rows[at] == (row if is_live else -1)
            assert (step.words.positions[at], step.words.seq_lens[at]) == (position, length)
            if step.words.end_lens is not None:
                assert step.words.end_lens[at] == length
            drawn = step.words.draws[:, at + step.draws_from]
            assert (drawn[0], drawn[1]) == (row if is_live else -1, position)
            assert drawn[2] == (1000 + position if is_live else 0), (
                "the output index goes with the position"
            )
    assert torch.equal(step.table, expected), "nothing else is written"
    assert torch.equal(step.words.draws[:, : step.draws_from], draws[:, : step.draws_from])
    assert torch.equal(step.words.rows[-5:], words[-5:])
    assert (step.num_drafts[-2:] == 0).all(), "padding drafts nothing"


def test_drafts_that_are_there_stay_as_they_are(generator: torch.Generator) -> None:
    step = Step(generator, {0: 17, 5: 250, 1: 9}, [3, 15, 0], [2, -1, 4])
    table = step.table.clone()
    draft_rows(
        step.steps,
        step.known_words,
        step.table,
        step.words,
        match_scratch(5, step.table.device),
        step.num_drafts,
        are_there=True,
    )
    assert torch.equal(step.table, table)
    assert step.num_drafts.tolist() == [3, 15, 0, 0, 0]
    assert step.words.positions[:4].tolist() == [16, 17, 18, 19]
    assert step.words.positions[4:20].tolist() == list(range(249, 265))
    assert step.words.draws[2, 20] == 1008
    assert step.known_words[[0, 5, 1]].tolist() == [17, 250, 9]


def test_a_match_is_compared_no_further_than_is_known(generator: torch.Generator) -> None:
    step = Step(generator, {1: MAX_MATCH * 4}, [5], [-1], vocab_size=1)
    step.draft()
    assert step.num_drafts[0] == 5
    assert (step.table[1] == 0).all()


@pytest.mark.parametrize("num_right", [0, 1, 4, 15])
def test_a_row_gains_up_to_the_first_draft_that_differs(
    num_right: int, generator: torch.Generator
) -> None:
    step = Step(generator, {3: 400, 5: 60}, [15, 2], [3, -1], vocab_size=2, draws_from=2)
    step.draft()
    assert step.num_drafts[:2].tolist() == [15, 2]
    sampled = torch.full((step.num_tokens + 2,), 7, dtype=torch.int32, device=step.table.device)
    # Of the first row so many are right, of the second none.
    sampled[2 : 2 + num_right] = step.table[3, 400 : 400 + num_right]
    sampled[2 + num_right + 1 : 18] = step.table[3, 400 + num_right + 1 : 416]
    table = step.table.clone()
    results = torch.zeros(3, 64, dtype=torch.int32, device=table.device)
    gains = torch.zeros(3, 9, dtype=torch.int32, device=table.device)
    first = torch.tensor([2 * 64, 9], dtype=torch.int32, device=table.device)
    store_drafted(
        step.steps,
        step.known_words,
        step.table,
        step.words.draws,
        step.num_drafts,
        sampled,
        results,
        gains,
        first,
    )
    num_gained = num_right + 1
    table[3, 400 : 400 + num_gained] = sampled[2 : 2 + num_gained]
    table[5, 60] = 7
    assert torch.equal(step.table, table)
    assert (step.known_words[3], step.known_words[5]) == (400 + num_gained, 61)
    assert gains[1, :2].tolist() == [num_gained + 256 * 15, 1 + 256 * 2]
    assert (gains[1, 2:] == 0).all()
    assert torch.equal(results[2, 2:21], sampled[2:21]), "of all that was sampled"
    assert (results[:2] == 0).all()


@GPU
@pytest.mark.parametrize("num_known", [2, 1000, 8191, 40_000])
def test_long_rows_are_looked_through_to_their_end(num_known: int) -> None:
    device = torch.device("cuda")
    table = torch.arange(50_000, dtype=torch.int32, device=device).repeat(2, 1)
    table[1, num_known - 2 : num_known] = torch.tensor([0, 1], dtype=torch.int32)
    steps = torch.tensor([[1], [0], [6], [1], [0]], dtype=torch.int32, device=device)
    known = torch.full((2,), num_known, dtype=torch.int32, device=device)
    columns = torch.zeros(3, 7, dtype=torch.int32, device=device)
    words = StepWords(*columns, None, torch.zeros(4, 7, dtype=torch.int32, device=device))
    num_drafts = torch.zeros(1, dtype=torch.int32, device=device)
    draft_rows(steps, known, table, words, match_scratch(1, device), num_drafts)
    if num_known > 3:
        assert num_drafts.item() == 6
        assert table[1, num_known : num_known + 6].tolist() == [2, 3, 4, 5, 6, 7]
