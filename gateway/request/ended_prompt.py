"""Figures of an ended prompt, from which `explain` is rendered when a client asks."""

from __future__ import annotations

from typing import Any

import msgspec

from .timeline import Timeline

# Measured with tracemalloc, CPython 3.11, 2026-11-27.
PROMPT_BYTES = 400
ATTEMPT_BYTES = 650
CANDIDATE_BYTES = 500
CHOICE_BYTES = 550
"""Estimated bytes of a prompt, of each of its attempts, of each candidate of an attempt, and of
each choice with the figures of its engine."""


class EndedPrompt(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Figures of a prompt, without its tokens and its answer. Most are dropped before a client asks
    for them."""

    timeline: Timeline
    num_prompt_tokens: int
    cached_tokens: int
    cached_by_tier: dict[str, int]
    num_output_tokens: int
    adapter: bytes = b""
    """Hash of the adapter's content; empty: none."""
    choices: tuple[dict[str, Any], ...]
    """Plain data of its choices."""

    @property
    def num_bytes(self) -> int:
        """Estimated bytes of memory."""
        num_bytes = PROMPT_BYTES + CHOICE_BYTES * len(self.choices)
        for attempt in self.timeline.attempts:
            num_bytes += ATTEMPT_BYTES + CANDIDATE_BYTES * len(attempt.decision.candidates)
        return num_bytes

    def explained(self) -> dict[str, Any]:
        """Stages of its timeline as plain data, in their order."""
        return {
            "outcome": self.timeline.outcome,
            "adapter": self.adapter.hex() or None,
            "prompt_tokens": self.num_prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "cached_by_tier": self.cached_by_tier,
            "output_tokens": self.num_output_tokens,
            "seconds": self.timeline.stretches(),
            "queue": self.timeline.waits(),
            "choices": self.choices,
            "attempts": [attempt.explained() for attempt in self.timeline.attempts],
        }
