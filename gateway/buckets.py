"""Operations on the values of JetStream's buckets. They raise what NATS raises."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import AsyncIterator, Iterator, Mapping

import nats.errors
import nats.js.errors
from nats.js import JetStreamContext
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy, Header
from nats.js.kv import KeyValue

from headwater.services.runtime.errors import Unavailable

_PAGE, _MSG_SIZE = 512, "Nats-Msg-Size"
ENTRY_SECONDS = 10.0
"""Seconds that one entry of several may take: a server that restarts forgets its readers."""
_WRONG_LAST_SEQUENCE = 10071
"""JetStream's number for a subject that is not as it was expected to be."""
_FULL = (10023, 10077)
"""Its numbers for a server, and for a stream, that has no room."""


FAILURES = (nats.errors.Error, OSError, TimeoutError)
"""Exceptions of calls to NATS while the server is out of reach."""


class Missing(Exception):
    """The bucket has nothing under the key."""


class Overtaken(Exception):
    """Another writer has written under that subject since."""


@contextlib.contextmanager
def or_unavailable() -> Iterator[None]:
    """Turns failures of storage into `Unavailable`, with a sentence for the client."""
    try:
        yield
    except FAILURES as failure:
        if isinstance(failure, nats.js.errors.APIError) and is_full(failure):
            raise Unavailable(
                "durable storage is full: an administrator has to make room", code="storage_full"
            ) from None
        # A plain TimeoutError has no text.
        reason = str(failure) or "no reply in time"
        raise Unavailable(f"durable storage in NATS does not answer: {reason}", code="storage_unavailable") from None


async def put_once(js: JetStreamContext, subject: str, payload: bytes, headers: dict[str, str] | None = None) -> bool:
    """False where there is something under that subject already."""
    try:
        await publish_behind(js, subject, payload, after=0, headers=headers)
    except Overtaken:
        return False
    return True


async def publish_behind(
    js: JetStreamContext, subject: str, payload: bytes, *, after: int, headers: Mapping[str, str] | None = None
) -> int:
    """Writes while the subject's last message is that of sequence `after` (0: while there is none). Returns the
    sequence of its own. Raises `Overtaken`."""
    expected = {Header.EXPECTED_LAST_SUBJECT_SEQUENCE.value: str(after)}
    try:
        return (await js.publish(subject, payload, headers=expected | dict(headers or {}))).seq
    except nats.js.errors.APIError as refused:
        if is_wrong_sequence(refused):
            raise Overtaken from None
        raise


def is_wrong_sequence(refused: nats.js.errors.APIError) -> bool:
    """Another process has written under that subject since."""
    return refused.err_code == _WRONG_LAST_SEQUENCE


def is_full(refused: nats.js.errors.APIError) -> bool:
    """The server or the stream has no room."""
    return refused.err_code in _FULL


async def entries(bucket: KeyValue, pattern: str) -> AsyncIterator[KeyValue.Entry]:
    """Entries that match now. Raises nats' `TimeoutError` when the next one does not come."""
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
    """The server has sent entries, or is about to."""
    assert watcher._sub is not None
    info = await watcher._sub.consumer_info()
    return bool(info.num_pending or (info.delivered is not None and info.delivered.consumer_seq))


async def sizes(js: JetStreamContext, bucket: str, pattern: str) -> list[int]:
    """Bytes of each value that is there, without reading any."""
    found = last_headers(js, f"KV_{bucket}", f"$KV.{bucket}.{pattern}")
    return [int(headers.get(_MSG_SIZE, "0")) async for headers in found]


async def last_headers(js: JetStreamContext, stream: str, pattern: str) -> AsyncIterator[Mapping[str, str]]:
    """Headers of the last message of each subject that matches now."""
    consumer = ConsumerConfig(
        headers_only=True,
        deliver_policy=DeliverPolicy.LAST_PER_SUBJECT,
        ack_policy=AckPolicy.NONE,
        inactive_threshold=ENTRY_SECONDS,
        mem_storage=True,
    )
    messages = await js.pull_subscribe(pattern, stream=stream, config=consumer)
    try:
        num_left = (await messages.consumer_info()).num_pending or 0
        while num_left > 0:
            for message in await messages.fetch(min(_PAGE, num_left), timeout=ENTRY_SECONDS):
                num_left -= 1
                yield message.headers or {}
    finally:
        await messages.unsubscribe()


async def drop_keys(js: JetStreamContext, bucket: str, pattern: str) -> None:
    """Takes keys out of a bucket with all that they ever had. It writes nothing: a full bucket has room for it."""
    await js.purge_stream(f"KV_{bucket}", subject=f"$KV.{bucket}.{pattern}")


async def value_of(bucket: KeyValue, key: str) -> tuple[bytes, int]:
    """A value and its revision. Raises `Missing`."""
    try:
        entry = await bucket.get(key)
    except nats.js.errors.NotFoundError:
        raise Missing(key) from None
    return entry.value or b"", entry.revision or 0
