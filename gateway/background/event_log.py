"""The events of a response in the background, several in a message, kept for an hour for whoever reads them.

A run that goes on where another died says what that one had not: the text is the same, how it is cut may not be.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable
from itertools import accumulate
from typing import Any

import msgspec
import nats.errors
import nats.js.errors
from nats.js import JetStreamContext
from nats.js.api import ConsumerConfig, DeliverPolicy, Header

from headwater.gateway.batches.buckets import is_wrong_sequence
from headwater.gateway.batches.durable import BACKGROUND_LOG, FAILURES, Durable
from headwater.services import subjects

Event = dict[str, Any]
FINAL = ("response.completed", "response.incomplete", "response.failed", "response.cancelled")
MAX_BYTES = 512 * 1024
"""Of the events in one message, but for one that is longer by itself."""
READ_SECONDS = 4.0
"""Of one question for more; a server that restarts forgets who was listening."""
_events = msgspec.json.Decoder(list[Event])


class Overtaken(Exception):
    """Somebody else has written since."""


class EventWriter:
    """Adds behind what is there, as long as nobody else does."""

    def __init__(self, durable: Durable, response_id: str) -> None:
        self._durable, self._subject = durable, subjects.background_events(response_id)
        self._last_sequence = self._num_events = 0
        self._told: Counter[tuple[str, int]] = Counter()
        """Characters of deltas, and other events, by type and item."""
        self._waiting: list[bytes] = []
        self._flushing = asyncio.Lock()

    async def catch_up(self) -> None:
        """With what an earlier run wrote."""
        rooms = await self._durable.rooms()
        async for sequence, events in _written(rooms.js, self._subject):
            self._last_sequence = sequence
            self._num_events += len(events)
            for event in events:
                self._told[_key(event)] += len(event["delta"]) if "delta" in event else 1

    def add(self, event: Event) -> None:
        """To be written with the next `flush`, unless it was told before."""
        told = self._told[_key(event)]
        if "delta" in event:
            self._told[_key(event)] -= min(told, len(event["delta"]))
            event = event | {"delta": event["delta"][told:]}
            if not event["delta"]:
                return
        elif told:
            self._told[_key(event)] -= 1
            return
        self._waiting.append(msgspec.json.encode(event | {"sequence_number": self._num_events}))
        self._num_events += 1

    async def flush(self) -> None:
        """Raises `Overtaken`, and what NATS raises."""
        rooms = await self._durable.rooms()
        # Who flushes at the same time would say the same once more, and find that somebody was faster.
        async with self._flushing:
            while self._waiting:
                sizes = accumulate(len(event) for event in self._waiting)
                events = self._waiting[: max(1, sum(size <= MAX_BYTES for size in sizes))]
                expected = {Header.EXPECTED_LAST_SUBJECT_SEQUENCE.value: str(self._last_sequence)}
                try:
                    ack = await rooms.js.publish(self._subject, b"[" + b",".join(events) + b"]", headers=expected)
                except nats.js.errors.APIError as refused:
                    if is_wrong_sequence(refused):
                        raise Overtaken from None
                    raise
                self._last_sequence = ack.seq
                del self._waiting[: len(events)]


async def follow(durable: Durable, response_id: str, after: int, check: Callable[[], None]) -> AsyncIterator[Event]:
    """Events behind one that the reader has (−1: all), up to the last there will be. `check` raises once the reader may
    not have more."""
    subject, last_sequence = subjects.background_events(response_id), 0
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


@contextlib.asynccontextmanager
async def _listening(
    js: JetStreamContext, subject: str, after: int
) -> AsyncIterator[JetStreamContext.PushSubscription]:
    """Hears what comes behind a sequence."""
    start = ConsumerConfig(deliver_policy=DeliverPolicy.BY_START_SEQUENCE, opt_start_seq=after + 1)
    listening = await js.subscribe(subject, stream=BACKGROUND_LOG, ordered_consumer=True, config=start)
    try:
        yield listening
    finally:
        with contextlib.suppress(*FAILURES):
            await listening.unsubscribe()


async def _written(js: JetStreamContext, subject: str) -> AsyncIterator[tuple[int, list[Event]]]:
    """(sequence in the stream, events) of every message that is there now."""
    after = 0
    while True:
        try:
            message = await js.get_msg(BACKGROUND_LOG, seq=after + 1, subject=subject, next=True)
        except nats.js.errors.NotFoundError:
            return
        assert message.seq is not None
        after = message.seq
        yield after, _events.decode(message.data or b"[]")


def _key(event: Event) -> tuple[str, int]:
    return event["type"], event.get("output_index", -1)
