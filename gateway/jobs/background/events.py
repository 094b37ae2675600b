"""The events of a background response, several in a message, kept for an hour for their readers.

A run that goes on where another died writes the events that are missing: the text is the same, its
division into events may not be.
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable
from itertools import accumulate
from typing import Any

import msgspec

from headwater.services.runtime import subjects

from ..durable import BACKGROUND_LOG, Durable
from ..event_log import QUIET_SECONDS, EventLog
from ..tenant_storage import NUM_BYTES

Event = dict[str, Any]
FINAL = ("response.completed", "response.incomplete", "response.failed", "response.cancelled")
MAX_BYTES = 512 * 1024
"""Largest number of bytes of the events in one message; a longer event has a message of its own."""
_events = msgspec.json.Decoder(list[Event])


class EventWriter:
    """Appends behind the last event, as long as no other writer does."""

    def __init__(self, durable: Durable, tenant: str, response_id: str) -> None:
        self._log = log_of(durable, tenant, response_id)
        self._last_sequence = self._num_events = 0
        self.num_bytes = 0
        """Number of bytes of the stored events and of those that wait to be written."""
        self._event_sizes: Counter[tuple[str, int]] = Counter()
        """Number of characters of deltas, and of other events, by type and item."""
        self._waiting: list[bytes] = []
        self._flushing = asyncio.Lock()

    async def catch_up(self) -> None:
        """Reads what an earlier run wrote."""
        async for sequence, data in self._log.stored():
            events = _events.decode(data)
            self._last_sequence = sequence
            self._num_events += len(events)
            self.num_bytes += len(data)
            for event in events:
                self._event_sizes[_key(event)] += len(event["delta"]) if "delta" in event else 1

    def add(self, event: Event) -> None:
        """Adds an event to the next `flush`, unless it was written before."""
        num_written = self._event_sizes[_key(event)]
        if "delta" in event:
            self._event_sizes[_key(event)] -= min(num_written, len(event["delta"]))
            event = event | {"delta": event["delta"][num_written:]}
            if not event["delta"]:
                return
        elif num_written:
            self._event_sizes[_key(event)] -= 1
            return
        self._waiting.append(msgspec.json.encode(event | {"sequence_number": self._num_events}))
        self._num_events += 1
        self.num_bytes += len(self._waiting[-1]) + 1

    @property
    def num_waiting(self) -> int:
        """Number of events that are not written yet."""
        return len(self._waiting)

    @property
    def num_waiting_bytes(self) -> int:
        return sum(len(event) + 1 for event in self._waiting)

    async def discard(self) -> None:
        """Drops the events that are not written yet."""
        async with self._flushing:
            self._num_events -= len(self._waiting)
            self.num_bytes -= self.num_waiting_bytes
            self._waiting.clear()

    async def flush(self, most: int = sys.maxsize) -> None:
        """Writes that many events, the oldest first. Raises `Overtaken`, and what NATS raises."""
        # A second flush at the same time would write the same again, and find another writer's
        # events.
        async with self._flushing:
            while self._waiting and most > 0:
                sizes = accumulate(len(event) for event in self._waiting[:most])
                events = self._waiting[: max(1, sum(size <= MAX_BYTES for size in sizes))]
                num_waiting = sum(len(event) + 1 for event in self._waiting[len(events) :])
                self._last_sequence = await self._log.append(
                    b"[" + b",".join(events) + b"]",
                    after=self._last_sequence,
                    headers={NUM_BYTES: str(self.num_bytes - num_waiting)},
                )
                del self._waiting[: len(events)]
                most -= len(events)

    async def forget(self) -> None:
        """Drops the stored events. The numbers go on."""
        await self._log.drop()
        self._last_sequence = self.num_bytes = 0


def log_of(durable: Durable, tenant: str, response_id: str) -> EventLog:
    """Log of a response's events, or of the events of all responses (`>`)."""
    return EventLog(durable, BACKGROUND_LOG, subjects.background_events(tenant, response_id))


async def follow(
    durable: Durable, tenant: str, response_id: str, after: int, check: Callable[[], None]
) -> AsyncIterator[Event]:
    """Yields the events behind one that the reader has (−1: all), up to the last, or until they are
    deleted. `check` raises once the reader may not have more."""
    log = log_of(durable, tenant, response_id)
    async with log.reader() as reader:
        while True:
            check()
            message = await reader.next(QUIET_SECONDS)
            if message is not None:
                events = _events.decode(message.data)
                for event in events:
                    if event["sequence_number"] > after:
                        yield event
                if events[-1]["type"] in FINAL:
                    return
            elif await log.is_empty():
                # The events were deleted, perhaps with the tenant, or have expired: no more will
                # come.
                check()
                return


def _key(event: Event) -> tuple[str, int]:
    return event["type"], event.get("output_index", -1)
