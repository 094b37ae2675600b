"""Chats over two replicas of the demo model: each turn goes where its prefix is, and only its
tenant hits it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

import pytest

from headwater.gateway.router.policy import SPREAD
from tests.cached_tokens import expected_cached_tokens
from tests.gateway.processes import UNDRAFTED

BLOCK_SIZE = 16


@dataclass
class Talk:
    """One chat: what was said, and which token ids the line holds KV for."""

    line: Any
    system: str
    tenant: str = "open"
    messages: list[dict[str, str]] = field(default_factory=list)
    computed_ids: list[int] = field(default_factory=list)
    decisions: list[dict[str, Any]] = field(default_factory=list)
    cached_tokens: list[int] = field(default_factory=list)
    expected: list[int] = field(default_factory=list)

    @property
    def replicas(self) -> list[str]:
        return [decision["replica_id"] for decision in self.decisions]

    def follow_ups(self) -> Iterator[tuple[dict[str, Any], dict[str, Any], int, int]]:
        """Each turn but the first: the decision before, its own, the tokens cached and those that
        could be."""
        return zip(
            self.decisions,
            self.decisions[1:],
            self.cached_tokens[1:],
            self.expected[1:],
            strict=False,
        )

    def ask(self, question: str) -> None:
        if not self.messages:
            self.messages.append({"role": "system", "content": self.system})
        self.messages.append({"role": "user", "content": question})
        answer = self.line.chat(
            self.messages,
            max_tokens=24,
            return_token_ids=True,
            headers={"x-headwater-receipt": "1", "x-tenant": self.tenant},
        )
        (choice,) = answer["choices"]
        prompt_ids = answer["prompt_token_ids"]
        pairs = zip(self.computed_ids, prompt_ids, strict=False)
        common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        self.expected.append(expected_cached_tokens(common, len(prompt_ids), BLOCK_SIZE))
        self.cached_tokens.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
        self.decisions.append(answer["receipt"]["decision"])
        # The last token's KV is computed with the step that would follow it.
        self.computed_ids = prompt_ids + choice["token_ids"][:-1]
        self.messages.append({"role": "assistant", "content": choice["message"]["content"]})


def costs_least(chosen: str, seen: dict[str, dict[str, Any]]) -> bool:
    """Or as good as that: those within `SPREAD` of the best are equal. Receipts round to
    microseconds."""
    costs = {name: candidate["cost_seconds"] for name, candidate in seen.items()}
    return bool(costs[chosen] <= (1 + SPREAD) * min(costs.values()) + 2e-6)


@pytest.mark.slow
@pytest.mark.long
def test_every_turn_of_a_chat_is_served_where_its_prefix_is_cached(demo_line: Any) -> None:
    rivers = Talk(
        demo_line,
        "You know everything about rivers, streams, springs and lakes, and answer in one sentence.",
    )
    cooking = Talk(
        demo_line,
        "You are a cook in a small harbour town who loves to talk about fish, bread and salt.",
    )
    for question in (
        "Where does a river begin?",
        "And where does it end?",
        "What lives in between?",
    ):
        rivers.ask(question)
        cooking.ask(question)
    follow_ups = [turn for talk in (rivers, cooking) for turn in talk.follow_ups()]
    for before, after, cached, expected in follow_ups:
        seen = {candidate["replica_id"]: candidate for candidate in after["candidates"]}
        # What an engine says of an answer's blocks may be on its way still; the prompt's are known
        # since it was sent.
        assert 0 < seen[before["replica_id"]]["matched_tokens"] <= expected
        # Nearly always where the prefix is: each replica's speed is learned, and may differ by more
        # than it saves.
        assert costs_least(after["replica_id"], seen)
        if after["replica_id"] == before["replica_id"]:
            assert cached == expected
    assert any(before["replica_id"] == after["replica_id"] for before, after, _, _ in follow_ups)
    assert rivers.cached_tokens[0] == cooking.cached_tokens[0] == 0


@pytest.mark.slow
@pytest.mark.long
def test_an_unrelated_chat_goes_where_it_costs_least_with_what_runs_there_counted(
    demo_line: Any,
) -> None:
    asked: dict[str, Any] = {"max_tokens": 3000, "ignore_eos": True} | UNDRAFTED
    with demo_line.stream("Count to a thousand: one, two,", **asked) as events:
        next(events)
        loads = demo_line.loads_of(2)
        (busy,) = (name for name, engine in loads.items() if engine["load"]["num_running"])
        third = Talk(demo_line, "You translate whatever you are told into the language of birds.")
        third.ask("Good morning, who is there?")
    assert third.cached_tokens == [0]
    seen = {candidate["replica_id"]: candidate for candidate in third.decisions[0]["candidates"]}
    assert {name: candidate["num_requests"] for name, candidate in seen.items()} == {
        name: int(name == busy) for name in seen
    }
    # Not always the idle one: each replica's speed is learned, and two engines on one machine
    # measure differently.
    assert costs_least(*third.replicas, seen)


@pytest.mark.slow
@pytest.mark.long
def test_another_tenants_same_prompt_hits_nothing(demo_line: Any) -> None:
    system = (
        "You keep the secrets of whoever asks you, and of nobody else in the world, for as "
        "long as you run."
    )
    mine = Talk(demo_line, system, tenant="mine")
    theirs = Talk(demo_line, system, tenant="theirs")
    mine.ask("What is my secret?")
    theirs.ask("What is my secret?")
    again = Talk(demo_line, system, tenant="mine")
    again.ask("What is my secret?")
    assert theirs.cached_tokens == [0]
    assert again.cached_tokens[0] > 0 or again.replicas != mine.replicas
