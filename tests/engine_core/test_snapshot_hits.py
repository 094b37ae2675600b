"""Hits of conversations whose prompts grow turn by turn: those at snapshots beside those that a
snapshot at each border would give without memory, and how much of the pool snapshots take."""

from __future__ import annotations

import pytest

from headwater.bench.agent_trace import AGENTS, CHATS, Conversations, Trace
from headwater.bench.snapshot_hits import best_split, run

FEW = Conversations(
    num_conversations=6,
    num_at_once=3,
    system=400,
    task=range(600, 1200),
    answer=range(20, 120),
    added=range(80, 800),
    turns=range(4, 9),
    is_in_turn=True,
)
SET_PAGES = 48
"""Pages of 64 tokens of a set that takes as much as 3,070 tokens: of a 35B-A3B model."""


@pytest.mark.parametrize(
    ("shape", "state_pages", "num_blocks"),
    [
        pytest.param(FEW, 4, 500, id="few"),
        pytest.param(AGENTS, SET_PAGES, 8000, id="prompts to 80,000", marks=pytest.mark.long),
    ],
)
def test_agents_find_at_few_snapshots_nearly_all_that_is_cached(
    shape: Conversations, state_pages: int, num_blocks: int
) -> None:
    found = run(shape, state_pages, num_blocks)
    assert found.num_hit_tokens >= 0.99 * run(shape, 0, num_blocks).num_hit_tokens
    assert 0 < found.snapshot_share <= 0.1


@pytest.mark.long
def test_chats_find_what_the_best_split_of_the_pool_gives() -> None:
    found = run(CHATS, SET_PAGES, 6000)
    assert found.num_hit_tokens >= 0.9 * best_split(CHATS, found, SET_PAGES, 6000)


def test_the_order_in_which_turns_end_changes_no_prompt() -> None:
    def prompts_of(backwards: bool) -> list[tuple[int, tuple[int, ...]]]:
        trace = Trace(FEW, 100)
        found = []
        while trace.has_more:
            due = list(trace.due())
            found += [(conversation, tuple(prompt)) for conversation, prompt, _ in due]
            for conversation, _, length in reversed(due) if backwards else due:
                trace.answered(conversation, [1] * length)
        return sorted(found)

    assert prompts_of(backwards=True) == prompts_of(backwards=False)
