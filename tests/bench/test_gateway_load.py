from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from typing import Any, ClassVar

import pytest

from headwater.bench import gateway_load
from headwater.bench.sse_client import Outcome


@pytest.mark.long
@pytest.mark.parametrize(
    ("args", "figure"),
    [
        (("overhead", "--rate=40", "--seconds=1", "--no-pin"), "gateway_cpu_ms_per_request"),
        (("streams", "--streams=8", "--seconds=1"), "gateway_kib_per_stream"),
    ],
)
def test_a_gateway_is_weighed(args: tuple[str, ...], figure: str) -> None:
    command = [sys.executable, "-m", "headwater.bench.gateway_load", *args, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True)
    figures = json.loads(done.stdout)
    assert figures[figure] > 0
    assert figures.get("failed", 0) == 0


class Connection:
    """A stream that begins a while after it is asked for; the sixth one fails."""

    waiting: ClassVar[list[int]] = []
    """Numbers of streams that had not begun when one was asked for."""
    opened: ClassVar[list[Connection]] = []

    def __init__(self) -> None:
        self.has_begun = False

    @classmethod
    async def open(cls, base_url: str) -> Connection:
        cls.opened.append(cls())
        return cls.opened[-1]

    async def call(self, path: str, body: dict[str, Any], headers: dict[str, str]) -> Outcome:
        self.waiting.append(sum(not each.has_begun for each in self.opened))
        await asyncio.sleep(0.01)
        if body["seed"] == 5:
            return Outcome(0.0, error="too many")
        self.has_begun = True
        await asyncio.Event().wait()
        raise AssertionError


def test_streams_are_opened_some_at_once_and_the_first_that_ends_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gateway_load, "SseConnection", Connection)
    monkeypatch.setattr(gateway_load, "OPENED_AT_ONCE", 2)
    with pytest.raises(RuntimeError, match="1 of 6 streams ended: too many"):
        asyncio.run(gateway_load._hold("", "model", os.getpid(), 8, 0.0))
    assert max(Connection.waiting) == 2
    assert len(Connection.waiting) == 6
