"""Role of an engine: whether it computes prompts, answers or both, and how its core divides its
time."""

from __future__ import annotations

from collections.abc import Callable

from ...runtime.role import BOTH, DECODE
from ..core.messages import BoundPrompts, Command

PROMPT_SECONDS = 0.01
"""Time that a step of a decode engine spends on prompts. Answers arrive from other engines at any
time, and their readers would notice a longer gap between two tokens."""


class EngineRole:
    def __init__(self, send: Callable[[Command], None]) -> None:
        """`send`: to the core."""
        self._send = send
        self.name = BOTH

    def become(self, name: str) -> None:
        if (name == DECODE) != (self.name == DECODE):
            self._send(BoundPrompts(PROMPT_SECONDS if name == DECODE else 0.0))
        self.name = name
