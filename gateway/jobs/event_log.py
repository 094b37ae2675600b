"""A log of messages under one subject of a JetStream stream: appended to, read, followed, dropped.

Events of background responses and results of batches are such logs. Knows nothing about what
messages hold. The stream limits how long they are kept (`durable.py`).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Mapping

import nats.errors
import nats.js.errors
from nats.aio.msg import Msg
from nats.js import JetStreamContext
from nats.js.api import ConsumerConfig, DeliverPolicy

from ..buckets import FAILURES, publish_behind
from .durable import Durable

QUIET_SECONDS = 4.0
"""Seconds without a message after which a reader subscribes again: a restarted server forgets its
readers."""


class EventLog:
    """One log. Every method raises what NATS raises, and `Unavailable` without NATS."""

    def __init__(self, durable: Durable, stream: str, subject: str) -> None:
        """`subject` may be a pattern, for logs that are read or dropped together."""
        self._durable = durable
        self._stream = stream
        self._subject = subject

    async def append(
        self, payload: bytes, *, after: int, headers: Mapping[str, str] | None = None
    ) -> int:
        """Appends after the message with sequence `after` (0: the log is empty); returns the new
        sequence. Raises `Overtaken`."""
        rooms = await self._durable.rooms()
        return await publish_behind(rooms.js, self._subject, payload, after=after, headers=headers)

    async def stored(self) -> AsyncIterator[tuple[int, bytes]]:
        """(sequence, payload) of every message that is there now, in their order."""
        rooms = await self._durable.rooms()
        after = 0
        while True:
            try:
                message = await rooms.js.get_msg(
                    self._stream, seq=after + 1, subject=self._subject, next=True
                )
            except nats.js.errors.NotFoundError:
                return
            assert message.seq is not None
            after = message.seq
            yield after, message.data or b""

    async def is_empty(self) -> bool:
        """Whether nothing was written, or all of it has expired or was dropped."""
        rooms = await self._durable.rooms()
        try:
            await rooms.js.get_last_msg(self._stream, self._subject)
        except nats.js.errors.NotFoundError:
            return True
        return False

    async def drop(self) -> None:
        """Deletes all messages. It writes nothing, so it works on a full stream."""
        rooms = await self._durable.rooms()
        await rooms.js.purge_stream(self._stream, subject=self._subject)

    @contextlib.asynccontextmanager
    async def reader(self, *, headers_only: bool = False) -> AsyncIterator[LogReader]:
        reader = LogReader(self._durable, self._stream, self._subject, headers_only=headers_only)
        try:
            yield reader
        finally:
            await reader.close()


class LogReader:
    """Reads a log from its first message on, each message once, also over restarts of the
    server."""

    def __init__(self, durable: Durable, stream: str, subject: str, *, headers_only: bool) -> None:
        self._durable = durable
        self._stream = stream
        self._subject = subject
        self._headers_only = headers_only
        self._subscription: JetStreamContext.PushSubscription | None = None
        self._last_sequence = 0
        self._received_at = 0.0

    async def next(self, seconds: float) -> Msg | None:
        """The next message; None where none comes within `seconds`. Raises what NATS raises while
        it is out of reach."""
        subscription = self._subscription or await self._subscribe()
        try:
            message = await subscription.next_msg(timeout=seconds)
        except nats.errors.TimeoutError:
            if time.monotonic() - self._received_at >= QUIET_SECONDS:
                await self.close()
            return None
        except FAILURES:
            await self.close()
            raise
        self._received_at = time.monotonic()
        self._last_sequence = message.metadata.sequence.stream
        return message

    async def close(self) -> None:
        subscription = self._subscription
        self._subscription = None
        if subscription is not None:
            with contextlib.suppress(*FAILURES):
                await subscription.unsubscribe()

    async def _subscribe(self) -> JetStreamContext.PushSubscription:
        rooms = await self._durable.rooms()
        self._subscription = await rooms.js.subscribe(
            self._subject,
            stream=self._stream,
            ordered_consumer=True,
            config=ConsumerConfig(
                headers_only=self._headers_only,
                deliver_policy=DeliverPolicy.BY_START_SEQUENCE,
                opt_start_seq=self._last_sequence + 1,
            ),
        )
        self._received_at = time.monotonic()
        return self._subscription
