"""How many prompt tokens a step of an engine computes, by the engine's role."""

from __future__ import annotations

from ..runtime.role import DECODE
from .messages import Ready

STEP_SECONDS = 0.02
"""A step of prompt tokens takes about so long at most where answers go on that other engines began. They come at any
time, and whoever reads them notices a longer gap between two tokens."""
MIN_TOKENS, TOKEN_MULTIPLE = 256, 64
"""Fewer tokens a step would compute prompts slower than answers gain by it."""


def prompt_bound(role: str, ready: Ready) -> int:
    """Prompt tokens of a step at most; 0: as many as its budget has."""
    if role != DECODE or not ready.longest_step:
        return 0
    num_tokens = int(ready.max_step_tokens * STEP_SECONDS / ready.longest_step)
    return max(MIN_TOKENS, num_tokens // TOKEN_MULTIPLE * TOKEN_MULTIPLE)
