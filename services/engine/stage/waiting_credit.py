"""How much may wait at an engine, divided among the gateways.

Requests that would wait longer wait at the gateways: in turn with all others, for the replica that
is free first.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from headwater.proto.events_pb2 import Backlog

from ...runtime import subjects
from ...runtime.bus import Bus, Subscription
from ...runtime.tasks import owned_task

WAITING_SECONDS = 0.5
"""Seconds of prefill that may wait here: many times the way to a gateway and back."""
MIN_TOKENS = 2048
"""A few prompts even where prefill is slow."""
EXPIRY_SECONDS = 3.0
"""Seconds after which a silent gateway gets no more credit."""


@dataclass(frozen=True, slots=True)
class _Told:
    tokens: int
    at: float


class WaitingCredits:
    """Use within `running`, or hand backlogs to `on_backlog`."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._backlogs: dict[int, _Told] = {}

    @contextlib.asynccontextmanager
    async def running(self, bus: Bus, model_key: str) -> AsyncIterator[WaitingCredits]:
        """Listens to the gateways inside the `with` block."""
        async with (
            bus.subscribe(subjects.every_backlog(model_key)) as backlogs,
            owned_task(self._read(backlogs)),
        ):
            yield self

    def on_backlog(self, epoch: int, tokens: int) -> None:
        self._backlogs[epoch] = _Told(tokens, self._clock())

    def shares(self, prefill_tps: float) -> dict[int, int]:
        """Prompt tokens that each gateway may have waiting here: half in equal parts, so that each
        can send a first request, half in proportion to what waits at each. Empty, that is any
        number, while the engine's speed is unknown."""
        now = self._clock()
        self._backlogs = {
            epoch: reported
            for epoch, reported in self._backlogs.items()
            if now - reported.at < EXPIRY_SECONDS
        }
        if not self._backlogs or prefill_tps <= 0:
            return {}
        half = max(MIN_TOKENS, WAITING_SECONDS * prefill_tps) / 2
        equal = 1 / len(self._backlogs)
        waiting = sum(reported.tokens for reported in self._backlogs.values())
        return {
            epoch: round(half * (equal + (reported.tokens / waiting if waiting else equal)))
            for epoch, reported in self._backlogs.items()
        }

    async def _read(self, backlogs: Subscription) -> None:
        async for _, backlog in backlogs.decoded(Backlog.FromString, "backlog"):
            self.on_backlog(backlog.epoch, backlog.tokens)
