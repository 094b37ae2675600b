"""Lets one attempt for each prompt of a request run here: the latest. Knows attempts; knows nothing
about their computing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

Prompt = tuple[str, int]
"""A request's id and the number of the prompt."""
End = Callable[[], object]


@dataclass(slots=True)
class _Latest:
    attempt: int
    ends: dict[int, End] = field(default_factory=dict)
    """Functions that end its choices, by key."""


class AttemptFence:
    """Latest attempts of all prompts. A gateway that has given up an attempt may be unable to
    cancel it, so its next attempt ends it."""

    def __init__(self) -> None:
        self._latest: dict[Prompt, _Latest] = {}

    def is_stale(self, prompt: Prompt, attempt: int) -> bool:
        """Whether a later attempt is here already."""
        latest = self._latest.get(prompt)
        return latest is not None and latest.attempt > attempt

    def enter(self, prompt: Prompt, attempt: int, key: int, end: End) -> None:
        """Notes that a choice begins, and ends the choices of earlier attempts."""
        latest = self._latest.get(prompt)
        if latest is None or latest.attempt < attempt:
            earlier = latest.ends if latest is not None else {}
            latest = self._latest[prompt] = _Latest(attempt)
            for end_earlier in earlier.values():
                end_earlier()
        latest.ends[key] = end

    def leave(self, prompt: Prompt, key: int) -> None:
        """Notes that a choice of any attempt has ended."""
        if (latest := self._latest.get(prompt)) is not None:
            latest.ends.pop(key, None)
            if not latest.ends:
                del self._latest[prompt]
