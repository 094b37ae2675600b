"""Bounds the age of a signed call or message, by the clocks of both sides."""

from __future__ import annotations

import time

WINDOW_SECONDS = 60.0
"""Seconds within which the clocks of machines that form a cluster must agree."""


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def is_fresh(at_ms: int) -> bool:
    return abs(now_ms() - at_ms) <= WINDOW_SECONDS * 1000
