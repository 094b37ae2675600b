"""Prompts of made-up agents and chats: each turn goes on from the one before it, with the answer to
that and what comes in between. Drawn from a seed, token by token.

Agents share a system prompt. An agent thinks and calls a tool, whose result is its next input; so
its prompts grow, and come again within seconds while others run. A chat is the same with short
texts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversations:
    """Lengths in tokens."""

    num_conversations: int
    num_at_once: int
    """Requests that run at once, of conversations in turn."""
    system: int
    """Tokens that all prompts begin with."""
    task: range
    answer: range
    added: range
    """Input behind an answer: a tool's result, or a person's next message."""
    turns: range
    is_in_turn: bool
    """Whether the conversation that has waited longest continues first; else a random one."""

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt with its answer, at most."""
        num_added = (self.turns.stop - 1) * (self.answer.stop + self.added.stop)
        return self.system + self.task.stop + num_added


AGENTS = Conversations(
    num_conversations=12,
    num_at_once=8,
    system=3000,
    task=range(9000, 12_000),
    answer=range(50, 400),
    added=range(300, 3000),
    turns=range(10, 25),
    is_in_turn=True,
)
"""Prompts of 12,000 to 80,000 tokens."""
CHATS = Conversations(
    num_conversations=150,
    num_at_once=16,
    system=300,
    task=range(100, 500),
    answer=range(50, 400),
    added=range(20, 200),
    turns=range(3, 9),
    is_in_turn=False,
)
"""Prompts of 400 to 4,000 tokens, 2,000 in the middle."""


class Trace:
    """The turns of conversations. `next` gives a prompt, `answered` ends its turn."""

    def __init__(self, shape: Conversations, vocab_size: int, seed: int = 0) -> None:
        self._shape = shape
        self._vocab_size = vocab_size
        count = shape.num_conversations
        # Each has its own random numbers, so that prompts do not depend on the order in which turns
        # end.
        self._rngs = [np.random.default_rng((seed, number)) for number in range(count)]
        self._order = np.random.default_rng(seed)
        system = self._order.integers(0, vocab_size, shape.system).tolist()
        self._prompts = [system + self._ids(number, shape.task) for number in range(count)]
        self._turns_left = [self._number(number, shape.turns) for number in range(count)]
        self._waiting = list(range(count))
        self._num_running = 0

    @property
    def has_more(self) -> bool:
        return bool(self._waiting or self._num_running)

    def due(self) -> Iterator[tuple[int, list[int], int]]:
        """Requests that are sent now: conversation, prompt, and length of the answer."""
        while self._waiting and self._num_running < self._shape.num_at_once:
            self._num_running += 1
            first = 0 if self._shape.is_in_turn else self._order.integers(len(self._waiting))
            conversation = self._waiting.pop(first)
            yield (
                conversation,
                self._prompts[conversation],
                self._number(conversation, self._shape.answer),
            )

    def answered(self, conversation: int, answer: list[int]) -> None:
        """Ends a turn. The conversation waits for its next one, if there is one."""
        self._num_running -= 1
        self._prompts[conversation] = [
            *self._prompts[conversation],
            *answer,
            *self._ids(conversation, self._shape.added),
        ]
        self._turns_left[conversation] -= 1
        if self._turns_left[conversation]:
            self._waiting.append(conversation)

    def _ids(self, conversation: int, length: range) -> list[int]:
        count = self._number(conversation, length)
        ids: list[int] = self._rngs[conversation].integers(0, self._vocab_size, count).tolist()
        return ids

    def _number(self, conversation: int, numbers: range) -> int:
        return int(self._rngs[conversation].integers(numbers.start, numbers.stop))
