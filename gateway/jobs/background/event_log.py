"""The events of a background response, several in a message, kept for an hour for their readers.

A run that goes on where another died writes the events that are missing: the text is the same, its division into events
may not be.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable
from itertools import accumulate
from typing import Any

import msgspec
import nats.errors
import nats.js.errors
from nats.js import JetStreamContext
from nats.js.api import ConsumerConfig, DeliverPolicy, Header

from headwater.services.runtime import subjects

from ...buckets import FAILURES, is_wrong_sequence
from ..durable import BACKGROUND_LOG, Durable
from ..tenant_storage import NUM_BYTES

Event = dict[str, Any]
FINAL = ("response.completed", "response.incomplete", "response.failed", "response.cancelled")
MAX_BYTES = 512 * 1024
"""Largest number of bytes of the events in one message; a longer event has a message of its own."""
READ_SECONDS = 4.0
"""Seconds that one request for more events waits: a server that restarts forgets its readers."""
_events = msgspec.json.Decoder(list[Event])


class Overtaken(Exception):
    """Another writer has written since."""


class EventWriter:
    """Appends behind the last event, as long as no other writer does."""

    def __init__(self, durable: Durable, tenant: str, response_id: str) -> None:
        self._durable, self._subject = durable, subjects.background_events(tenant, response_id)
        self._last_sequence = self._num_events = 0
        self.num_bytes = 0
        """Number of bytes of the stored events and of those that wait to be written."""
        self._event_sizes: Counter[tuple[str, int]] = Counter()
        """Number of characters of deltas, and of other events, by type and item."""
        self._waiting: list[bytes] = []
        self._flushing = asyncio.Lock()

    async def catch_up(self) -> None:
        """Reads what an earlier run wrote."""
        rooms = await self._durable.rooms()
        async for sequence, data in _written(rooms.js, self._subject):
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
        rooms = await self._durable.rooms()
        # A second flush at the same time would write the same again, and find another writer's events.
        async with self._flushing:
            while self._waiting and most > 0:
                sizes = accumulate(len(event) for event in self._waiting[:most])
                events = self._waiting[: max(1, sum(size <= MAX_BYTES for size in sizes))]
                num_waiting = sum(len(event) + 1 for event in self._waiting[len(events) :])
                headers = {
                    Header.EXPECTED_LAST_SUBJECT_SEQUENCE.value: str(self._last_sequence),
                    NUM_BYTES: str(self.num_bytes - num_waiting),
                }
                try:
                    ack = await rooms.js.publish(self._subject, b"[" + b",".join(events) + b"]", headers=headers)
                except nats.js.errors.APIError as refused:
                    if is_wrong_sequence(refused):
                        raise Overtaken from None
                    raise
                self._last_sequence = ack.seq
                del self._waiting[: len(events)]
                most -= len(events)

    async def forget(self) -> None:
        """Drops the stored events. The numbers go on."""
        rooms = await self._durable.rooms()
        await rooms.js.purge_stream(BACKGROUND_LOG, subject=self._subject)
        self._last_sequence = self.num_bytes = 0


async def drop(durable: Durable, tenant: str, response_id: str) -> None:
    """Deletes the events of a response, or of all (`>`). It writes nothing, so it works on a full stream."""
    rooms = await durable.rooms()
    await rooms.js.purge_stream(BACKGROUND_LOG, subject=subjects.background_events(tenant, response_id))


async def follow(
    durable: Durable, tenant: str, response_id: str, after: int, check: Callable[[], None]
) -> AsyncIterator[Event]:
    """Yields the events behind one that the reader has (−1: all), up to the last, or until they are deleted. `check`
    raises once the reader may not have more."""
    subject, last_sequence = subjects.background_events(tenant, response_id), 0
    while True:
        rooms = await durable.rooms()
        async with _listening(rooms.js, subject, last_sequence) as listening:
            with contextlib.suppress(nats.errors.TimeoutError):
                while True:
                    check()
                    message = await listening.next_msg(timeout=READ_SECONDS)
                    last_sequence = message.metadata.sequence.stream
                    events = _events.decode(message.data)
                    for event in events:
                        if event["sequence_number"] > after:
                            yield event
                    if events[-1]["type"] in FINAL:
                        return
            if not await _is_there(rooms.js, subject):
                # The events were deleted, perhaps with the tenant, or have expired: no more will come.
                check()
                return


@contextlib.asynccontextmanager
async def _listening(
    js: JetStreamContext, subject: str, after: int
) -> AsyncIterator[JetStreamContext.PushSubscription]:
    """Subscription to the messages behind a sequence number."""
    start = ConsumerConfig(deliver_policy=DeliverPolicy.BY_START_SEQUENCE, opt_start_seq=after + 1)
    listening = await js.subscribe(subject, stream=BACKGROUND_LOG, ordered_consumer=True, config=start)
    try:
        yield listening
    finally:
        with contextlib.suppress(*FAILURES):
            await listening.unsubscribe()


async def _is_there(js: JetStreamContext, subject: str) -> bool:
    try:
        await js.get_last_msg(BACKGROUND_LOG, subject)
    except nats.js.errors.NotFoundError:
        return False
    return True


async def _written(js: JetStreamContext, subject: str) -> AsyncIterator[tuple[int, bytes]]:
    """(sequence in the stream, events as JSON) of every message that is stored now."""
    after = 0
    while True:
        try:
            message = await js.get_msg(BACKGROUND_LOG, seq=after + 1, subject=subject, next=True)
        except nats.js.errors.NotFoundError:
            return
        assert message.seq is not None
        after = message.seq
        yield after, message.data or b"[]"


def _key(event: Event) -> tuple[str, int]:
    return event["type"], event.get("output_index", -1)
