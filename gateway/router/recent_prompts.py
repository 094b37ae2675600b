"""The prompts that were sent last, by the hashes of their blocks: from them people are shown the
hottest prefixes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

NUM_RECENT = 512
MAX_BLOCKS = 256
"""Leading hashes that are kept of each prompt."""


@dataclass(frozen=True, slots=True)
class RecentPrompt:
    model_key: str
    hashes: tuple[bytes, ...]
    """First blocks of the prompt, each named by the hash of all tokens up to its end."""
    age: float
    """Seconds since it was sent."""


class RecentPrompts:
    def __init__(self) -> None:
        self._sent: deque[tuple[str, tuple[bytes, ...], float]] = deque(maxlen=NUM_RECENT)

    def add(self, model_key: str, hashes: tuple[bytes, ...], now: float) -> None:
        self._sent.append((model_key, hashes[:MAX_BLOCKS], now))

    def youngest_first(self, now: float) -> Iterator[RecentPrompt]:
        """`now` is of the clock that `add` was given."""
        for model_key, hashes, sent_at in reversed(self._sent):
            yield RecentPrompt(model_key, hashes, now - sent_at)
