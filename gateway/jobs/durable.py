"""Buckets and work queues on NATS JetStream, which outlive every process. Missing ones are created.

Knows their names and limits; knows nothing about their contents.
"""

from __future__ import annotations

from dataclasses import dataclass

import nats.errors
import nats.js.errors
from nats.js import JetStreamContext
from nats.js.api import (
    AckPolicy,
    ConsumerConfig,
    KeyValueConfig,
    ObjectStoreConfig,
    RetentionPolicy,
    StorageType,
    StreamConfig,
)
from nats.js.kv import KeyValue
from nats.js.object_store import ObjectStore

from headwater.services.runtime import subjects
from headwater.services.runtime.bus import Bus
from headwater.services.runtime.errors import Unavailable
from headwater.services.runtime.record_seal import RecordSeals

from ..signed_bucket import SignedBucket

KEPT_SECONDS = 30 * 86_400
"""Seconds that files and ended batches are kept."""
RUNNERS = "runners"
MAX_UNDONE = 100_000
"""Largest number of unacknowledged messages: more than the batches that all may wait at the same
time."""
HOLD_SECONDS = 6.0
"""Seconds of silence after which a batch or a range of lines is given to another process."""
FILES = "headwater_files"
CONTENTS = "headwater_file_contents"
BATCHES = "headwater_batches"
RESULTS = "headwater_batch_results"
BACKGROUND = "headwater_background"
BATCH_QUEUE = "headwater_batch_queue"
LINES_QUEUE = "headwater_batch_lines"
BACKGROUND_QUEUE = "headwater_background_queue"
BACKGROUND_LOG = "headwater_background_events"
BACKGROUND_SECONDS = 86_400.0
"""Seconds that background responses are kept, from their request on."""
EVENTS_SECONDS = 3_600.0
"""Seconds that their events are kept, each from its arrival on."""


@dataclass(frozen=True, slots=True)
class Rooms:
    """The buckets, queues and the object store."""

    js: JetStreamContext
    files: SignedBucket
    contents: ObjectStore
    batches: SignedBucket
    results: SignedBucket
    jobs: JetStreamContext.PullSubscription
    ranges: JetStreamContext.PullSubscription
    background: SignedBucket
    background_jobs: JetStreamContext.PullSubscription


class Durable:
    """Connection to the buckets and queues. `rooms` opens on first use, and again on a server that
    has lost them."""

    def __init__(self, bus: Bus, *, adopts_unsigned: bool = False) -> None:
        """`adopts_unsigned`: values without a seal are trusted; an earlier version wrote them."""
        self._bus = bus
        names = (FILES, BATCHES, RESULTS, BACKGROUND)
        self._seals = {name: RecordSeals(name, adopts_unsigned=adopts_unsigned) for name in names}
        self._rooms: Rooms | None = None

    @property
    def is_there(self) -> bool:
        """Whether NATS was in reach a moment ago."""
        return self._bus.jetstream() is not None

    @property
    def has_server(self) -> bool:
        """Whether the gateway was given a NATS, in reach or not."""
        return self._bus.url is not None

    async def rooms(self) -> Rooms:
        """The buckets and queues. Raises `Unavailable` without NATS, and what JetStream raises."""
        if self._rooms is None:
            js = self._bus.jetstream()
            if js is None:
                raise Unavailable(
                    "files and batches need NATS with JetStream", code="storage_unavailable"
                )
            self._rooms = await self._open(js)
        return self._rooms

    async def sign_all(self) -> None:
        """Seals the values that have no seal yet, except results: lines without a sealed result are
        answered again."""
        rooms = await self.rooms()
        for bucket in (rooms.files, rooms.batches, rooms.background):
            await bucket.sign_all()

    def forget(self) -> None:
        """Makes the next use open everything anew: something was missing."""
        self._rooms = None

    async def _open(self, js: JetStreamContext) -> Rooms:
        await _stream(
            js,
            StreamConfig(
                name=BACKGROUND_LOG,
                subjects=[f"{subjects.BACKGROUND_EVENTS}.>"],
                max_age=EVENTS_SECONDS,
            ),
        )

        async def signed(name: str, seconds: float = KEPT_SECONDS) -> SignedBucket:
            return SignedBucket(js, await _bucket(js, name, seconds), self._seals[name])

        return Rooms(
            js=js,
            files=await signed(FILES),
            contents=await _object_store(js, CONTENTS),
            batches=await signed(BATCHES),
            results=await signed(RESULTS),
            jobs=await _queue(js, BATCH_QUEUE, subjects.BATCH_JOBS),
            ranges=await _queue(js, LINES_QUEUE, f"{subjects.BATCH_LINES}.>"),
            background=await signed(BACKGROUND, BACKGROUND_SECONDS),
            background_jobs=await _queue(js, BACKGROUND_QUEUE, subjects.BACKGROUND_JOBS),
        )


async def _queue(
    js: JetStreamContext, name: str, subject: str
) -> JetStreamContext.PullSubscription:
    await _stream(
        js, StreamConfig(name=name, subjects=[subject], retention=RetentionPolicy.WORK_QUEUE)
    )
    consumer = ConsumerConfig(
        durable_name=RUNNERS,
        ack_policy=AckPolicy.EXPLICIT,
        ack_wait=HOLD_SECONDS,
        max_ack_pending=MAX_UNDONE,
    )
    return await js.pull_subscribe(subject, durable=RUNNERS, stream=name, config=consumer)


async def _stream(js: JetStreamContext, config: StreamConfig) -> None:
    assert config.name is not None
    try:
        there = (await js.stream_info(config.name)).config
    except nats.js.errors.NotFoundError:
        await js.add_stream(config)
        return
    if there.subjects != config.subjects:
        # An earlier version made it.
        there.subjects = config.subjects
        await js.update_stream(there)


async def _bucket(js: JetStreamContext, name: str, seconds: float = KEPT_SECONDS) -> KeyValue:
    try:
        return await js.key_value(name)
    except nats.js.errors.NotFoundError:
        return await js.create_key_value(
            KeyValueConfig(bucket=name, ttl=seconds, storage=StorageType.FILE)
        )


async def _object_store(js: JetStreamContext, name: str) -> ObjectStore:
    try:
        return await js.object_store(name)
    except nats.js.errors.NotFoundError:
        config = ObjectStoreConfig(bucket=name, ttl=KEPT_SECONDS, storage=StorageType.FILE)
        return await js.create_object_store(name, config)
