"""What outlives every process: buckets and work queues on NATS JetStream, made where they are missing.

Knows their names and limits; knows nothing about what lies in them.
"""

from __future__ import annotations

import base64
import contextlib
import functools
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass

import nats.errors
import nats.js.errors
from nats.js import JetStreamContext
from nats.js.api import (
    AckPolicy,
    ConsumerConfig,
    DeliverPolicy,
    Header,
    KeyValueConfig,
    ObjectStoreConfig,
    RetentionPolicy,
    StorageType,
    StreamConfig,
)
from nats.js.kv import KeyValue
from nats.js.object_store import ObjectStore

from headwater.services import subjects
from headwater.services.bus import Bus
from headwater.services.errors import Unavailable

KEPT_SECONDS = 30 * 86_400
"""Files and ended batches."""
RUNNERS = "runners"
MAX_UNDONE = 100_000
"""Pieces of work that are held or rest: more than there may be of batches that all must wait."""
HOLD_SECONDS = 6.0
"""A batch or a range of lines whose holder says nothing for so long goes to another."""
FAILURES = (nats.errors.Error, OSError, TimeoutError)
_PAGE, _MSG_SIZE = 512, "Nats-Msg-Size"
ENTRY_SECONDS = 10.0
"""What one entry of several may take: a server that restarts forgets who was reading."""
FILES, CONTENTS = "headwater_files", "headwater_file_contents"
BATCHES = "headwater_batches"
RESULTS = "headwater_batch_results"
BACKGROUND = "headwater_background"
BATCH_QUEUE = "headwater_batch_queue"
LINES_QUEUE = "headwater_batch_lines"
BACKGROUND_QUEUE = "headwater_background_queue"
BACKGROUND_LOG = "headwater_background_events"
BACKGROUND_SECONDS = 86_400.0
"""Responses in the background, from when they were asked for."""
EVENTS_SECONDS = 3_600.0
"""Their events, each from when it came."""
_WRONG_LAST_SEQUENCE = 10071
"""JetStream's number for a subject that is not as it was expected to be."""
_FULL = (10023, 10077)
"""Its numbers for a server, and for a stream, that has no room."""


class Missing(Exception):
    """There is nothing under that key."""


@contextlib.contextmanager
def or_unavailable() -> Iterator[None]:
    """A client hears in a sentence that storage is out of reach."""
    try:
        yield
    except FAILURES as failure:
        if isinstance(failure, nats.js.errors.APIError) and is_full(failure):
            raise Unavailable(
                "durable storage is full: an administrator has to make room", code="storage_full"
            ) from None
        raise Unavailable(f"durable storage does not answer: {failure!r}", code="storage_unavailable") from None


@dataclass(frozen=True, slots=True)
class Rooms:
    """Everything that is kept."""

    js: JetStreamContext
    files: KeyValue
    contents: ObjectStore
    batches: KeyValue
    results: KeyValue
    jobs: JetStreamContext.PullSubscription
    ranges: JetStreamContext.PullSubscription
    background: KeyValue
    background_jobs: JetStreamContext.PullSubscription


class Durable:
    """`rooms` opens on first use, and again on a server that has lost them."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._rooms: Rooms | None = None

    @property
    def is_there(self) -> bool:
        """It may be asked, that is; whether it answers is another question."""
        return self._bus.jetstream() is not None

    async def rooms(self) -> Rooms:
        """Raises `Unavailable` without NATS, and what JetStream raises."""
        if self._rooms is None:
            js = self._bus.jetstream()
            if js is None:
                raise Unavailable("files and batches need NATS with JetStream", code="storage_unavailable")
            self._rooms = await _open(js)
        return self._rooms

    def forget(self) -> None:
        """Something was not where it should be: look, and make, again."""
        self._rooms = None


async def _open(js: JetStreamContext) -> Rooms:
    await _stream(
        js,
        StreamConfig(name=BACKGROUND_LOG, subjects=[f"{subjects.BACKGROUND_EVENTS}.*"], max_age=EVENTS_SECONDS),
    )
    return Rooms(
        js=js,
        files=await _bucket(js, FILES),
        contents=await _object_store(js, CONTENTS),
        batches=await _bucket(js, BATCHES),
        results=await _bucket(js, RESULTS),
        jobs=await _queue(js, BATCH_QUEUE, subjects.BATCH_JOBS),
        ranges=await _queue(js, LINES_QUEUE, f"{subjects.BATCH_LINES}.>"),
        background=await _bucket(js, BACKGROUND, BACKGROUND_SECONDS),
        background_jobs=await _queue(js, BACKGROUND_QUEUE, subjects.BACKGROUND_JOBS),
    )


async def _queue(js: JetStreamContext, name: str, subject: str) -> JetStreamContext.PullSubscription:
    await _stream(js, StreamConfig(name=name, subjects=[subject], retention=RetentionPolicy.WORK_QUEUE))
    consumer = ConsumerConfig(
        durable_name=RUNNERS, ack_policy=AckPolicy.EXPLICIT, ack_wait=HOLD_SECONDS, max_ack_pending=MAX_UNDONE
    )
    return await js.pull_subscribe(subject, durable=RUNNERS, stream=name, config=consumer)


async def _stream(js: JetStreamContext, config: StreamConfig) -> None:
    assert config.name is not None
    try:
        await js.stream_info(config.name)
    except nats.js.errors.NotFoundError:
        await js.add_stream(config)


async def put_once(js: JetStreamContext, subject: str, payload: bytes, headers: dict[str, str] | None = None) -> bool:
    """False where there is something under that subject already."""
    expected = {Header.EXPECTED_LAST_SUBJECT_SEQUENCE.value: "0"}
    try:
        await js.publish(subject, payload, headers=expected | (headers or {}))
    except nats.js.errors.APIError as refused:
        if not is_wrong_sequence(refused):
            raise
        return False
    return True


def is_wrong_sequence(refused: nats.js.errors.APIError) -> bool:
    """Somebody else wrote under that subject since."""
    return refused.err_code == _WRONG_LAST_SEQUENCE


def is_full(refused: nats.js.errors.APIError) -> bool:
    """The server or the stream has no room."""
    return refused.err_code in _FULL


async def _bucket(js: JetStreamContext, name: str, seconds: float = KEPT_SECONDS) -> KeyValue:
    try:
        return await js.key_value(name)
    except nats.js.errors.NotFoundError:
        return await js.create_key_value(KeyValueConfig(bucket=name, ttl=seconds, storage=StorageType.FILE))


async def _object_store(js: JetStreamContext, name: str) -> ObjectStore:
    try:
        return await js.object_store(name)
    except nats.js.errors.NotFoundError:
        config = ObjectStoreConfig(bucket=name, ttl=KEPT_SECONDS, storage=StorageType.FILE)
        return await js.create_object_store(name, config)


async def entries(bucket: KeyValue, pattern: str) -> AsyncIterator[KeyValue.Entry]:
    """What matches now. Raises nats' `TimeoutError` when the next one does not come."""
    # NOTE: the server keeps what a watcher leaves behind for five minutes unless told otherwise, and 1,000 of it.
    watcher = await bucket.watch(pattern, inactive_threshold=ENTRY_SECONDS)
    updates = functools.partial(watcher.updates, timeout=ENTRY_SECONDS)
    try:
        entry = await updates()
        # NOTE: the client says by an entry that is none that there is nothing, also where the server has sent what
        # there is and it has not been read yet.
        if entry is None and await _has_sent(watcher):
            entry = await updates()
        while entry is not None:
            if entry.operation is None:
                yield entry
            entry = await updates() if entry.delta else None
    finally:
        await watcher.stop()  # type: ignore[no-untyped-call]


async def _has_sent(watcher: KeyValue.KeyWatcher) -> bool:
    """Or is about to."""
    assert watcher._sub is not None
    info = await watcher._sub.consumer_info()
    return bool(info.num_pending or (info.delivered is not None and info.delivered.consumer_seq))


async def sizes(js: JetStreamContext, bucket: str, pattern: str) -> list[int]:
    """Bytes of each value that is there, without reading any. Raises what NATS raises."""
    consumer = ConsumerConfig(
        headers_only=True,
        deliver_policy=DeliverPolicy.LAST_PER_SUBJECT,
        ack_policy=AckPolicy.NONE,
        inactive_threshold=ENTRY_SECONDS,
        mem_storage=True,
    )
    messages = await js.pull_subscribe(f"$KV.{bucket}.{pattern}", stream=f"KV_{bucket}", config=consumer)
    found: list[int] = []
    try:
        num_left = (await messages.consumer_info()).num_pending or 0
        while num_left > 0:
            for message in await messages.fetch(min(_PAGE, num_left), timeout=ENTRY_SECONDS):
                num_left -= 1
                found.append(int((message.headers or {}).get(_MSG_SIZE, "0")))
    finally:
        await messages.unsubscribe()
    return found


async def drop_keys(js: JetStreamContext, bucket: str, pattern: str) -> None:
    """Takes keys out of a bucket with all that they ever had. It writes nothing: a full bucket has room for it."""
    await js.purge_stream(f"KV_{bucket}", subject=f"$KV.{bucket}.{pattern}")


async def drop_object(rooms: Rooms, name: str) -> None:
    """Takes content out of the object store, if it is there. It writes nothing, as `drop_keys`."""
    try:
        info = await rooms.contents.get_info(name, show_deleted=True)
    except nats.js.errors.NotFoundError:
        return
    # The pieces first: without what is said of them nobody finds them.
    for subject in (f"C.{info.nuid}", f"M.{base64.urlsafe_b64encode(name.encode()).decode()}"):
        await rooms.js.purge_stream(f"OBJ_{CONTENTS}", subject=f"$O.{CONTENTS}.{subject}")


async def value_of(bucket: KeyValue, key: str) -> tuple[bytes, int]:
    """A value and its revision. Raises `Missing`."""
    try:
        entry = await bucket.get(key)
    except nats.js.errors.NotFoundError:
        raise Missing(key) from None
    return entry.value or b"", entry.revision or 0
