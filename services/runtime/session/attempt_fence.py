"""Of each prompt of a request one attempt runs here: the latest. Knows attempts, not what they compute."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

Prompt = tuple[str, int]
"""A request's id and which of its prompts."""
End = Callable[[], object]


@dataclass(slots=True)
class _Latest:
    attempt: int
    ends: dict[int, End] = field(default_factory=dict)
    """How to end each of its choices, by key."""


class Fence:
    """A gateway that has given an attempt up may be unable to say so: its next attempt says it."""

    def __init__(self) -> None:
        self._latest: dict[Prompt, _Latest] = {}

    def is_stale(self, prompt: Prompt, attempt: int) -> bool:
        """Whether a later attempt is here already."""
        latest = self._latest.get(prompt)
        return latest is not None and latest.attempt > attempt

    def enter(self, prompt: Prompt, attempt: int, key: int, end: End) -> None:
        """A choice begins; choices of earlier attempts are told to end."""
        latest = self._latest.get(prompt)
        if latest is None or latest.attempt < attempt:
            earlier = latest.ends if latest is not None else {}
            latest = self._latest[prompt] = _Latest(attempt)
            for end_earlier in earlier.values():
                end_earlier()
        latest.ends[key] = end

    def leave(self, prompt: Prompt, key: int) -> None:
        """A choice has ended, of whichever attempt."""
        if (latest := self._latest.get(prompt)) is not None:
            latest.ends.pop(key, None)
            if not latest.ends:
                del self._latest[prompt]
