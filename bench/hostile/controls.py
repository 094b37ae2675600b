"""Harmless clients. Their figures say what any traffic costs on a machine that clients and servers
share."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import dataclass

from .attack import Target

BUSY_SECONDS = 0.005


@dataclass(frozen=True, slots=True)
class OwnWork:
    """A client that uses as much CPU as it can, and sends nothing."""

    def prepare(self, model: str) -> None:
        pass

    async def run(self, target: Target, seen: Counter[str]) -> None:
        while True:
            end = time.monotonic() + BUSY_SECONDS
            while time.monotonic() < end:
                pass
            await asyncio.sleep(0)
