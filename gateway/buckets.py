"""Operations on the values of JetStream's buckets. They raise what NATS raises."""

from __future__ import annotations

import base64
import contextlib
from collections.abc import AsyncIterator, Iterator, Mapping

import nats.errors
import nats.js.errors
from nats.aio.msg import Msg
from nats.js import JetStreamContext
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy, Header
from nats.js.kv import KeyValue

from headwater.services.runtime.errors import Unavailable
from headwater.services.runtime.pending_messages import MESSAGE_SECONDS, pending_messages

_PAGE = 512
_PAGE_OF_VALUES = 32
"""Number of messages that are fetched at once: without values, and with values of up to a mebibyte
each."""
_MSG_SIZE = "Nats-Msg-Size"
_MARKS = frozenset({"KV-Operation", "Nats-Marker-Reason"})
"""Headers of messages that mark a key as deleted, in place of a value."""
_WRONG_LAST_SEQUENCE = 10071
"""JetStream's number for a subject that is not as it was expected to be."""
_FULL = (10023, 10077)
"""JetStream's error codes of a server, and of a stream, that has no room."""
_NO_SPACE = "no space left on device"
"""Words of JetStream's error for a full disk, whose code is that of every failed write."""


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
        raise Unavailable(
            f"durable storage in NATS does not answer: {reason}", code="storage_unavailable"
        ) from None


async def put_once(
    js: JetStreamContext, subject: str, payload: bytes, headers: dict[str, str] | None = None
) -> bool:
    """False where there is something under that subject already."""
    try:
        await publish_behind(js, subject, payload, after=0, headers=headers)
    except Overtaken:
        return False
    return True


async def publish_behind(
    js: JetStreamContext,
    subject: str,
    payload: bytes,
    *,
    after: int,
    headers: Mapping[str, str] | None = None,
) -> int:
    """Writes a message if the subject's last message has the sequence `after` (0: if there is
    none). Returns the sequence of the new message. Raises `Overtaken`."""
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
    """The server, its disk or the stream has no room."""
    return refused.err_code in _FULL or _NO_SPACE in (refused.description or "")


async def entries(js: JetStreamContext, bucket: str, pattern: str) -> AsyncIterator[KeyValue.Entry]:
    """Values whose keys match now. Raises `TimeoutError` when the next one does not come."""
    prefix = f"$KV.{bucket}."
    async for message in _last_messages(
        js, f"KV_{bucket}", f"{prefix}{pattern}", page=_PAGE_OF_VALUES
    ):
        if _MARKS.isdisjoint(message.headers or ()):
            revision = message.metadata.sequence.stream
            key = message.subject.removeprefix(prefix)
            yield KeyValue.Entry(
                bucket, key, message.data, revision, delta=None, created=None, operation=None
            )


async def sizes(js: JetStreamContext, bucket: str, pattern: str) -> list[int]:
    """Bytes of each value that is there, without reading any."""
    found = last_headers(js, f"KV_{bucket}", f"$KV.{bucket}.{pattern}")
    return [int(headers.get(_MSG_SIZE, "0")) async for headers in found]


async def last_headers(
    js: JetStreamContext, stream: str, pattern: str
) -> AsyncIterator[Mapping[str, str]]:
    """Headers of the last message of each subject that matches now."""
    async for message in _last_messages(js, stream, pattern, page=_PAGE, headers_only=True):
        yield message.headers or {}


async def _last_messages(
    js: JetStreamContext, stream: str, pattern: str, *, page: int, headers_only: bool = False
) -> AsyncIterator[Msg]:
    """The last message of each subject that matches now, `page` of them at a time; see
    `pending_messages`."""
    consumer = ConsumerConfig(
        headers_only=headers_only,
        deliver_policy=DeliverPolicy.LAST_PER_SUBJECT,
        ack_policy=AckPolicy.NONE,
        inactive_threshold=MESSAGE_SECONDS,
        mem_storage=True,
    )
    messages = pending_messages(
        await js.pull_subscribe(pattern, stream=stream, config=consumer), page
    )
    async with contextlib.aclosing(messages):
        async for message in messages:
            yield message


async def drop_keys(js: JetStreamContext, bucket: str, pattern: str) -> None:
    """Purges keys of a bucket. It writes nothing, so it works on a full bucket."""
    await js.purge_stream(f"KV_{bucket}", subject=f"$KV.{bucket}.{pattern}")


async def drop_object(js: JetStreamContext, bucket: str, name: str) -> None:
    """Deletes content from an object store, if it exists. It writes nothing, as `drop_keys`."""
    try:
        info = await (await js.object_store(bucket)).get_info(name, show_deleted=True)
    except nats.js.errors.NotFoundError:
        return
    # The pieces are deleted first: without their entry nothing finds them.
    for subject in (f"C.{info.nuid}", f"M.{base64.urlsafe_b64encode(name.encode()).decode()}"):
        await js.purge_stream(f"OBJ_{bucket}", subject=f"$O.{bucket}.{subject}")


async def value_of(bucket: KeyValue, key: str) -> tuple[bytes, int]:
    """A value and its revision. Raises `Missing`."""
    try:
        entry = await bucket.get(key)
    except nats.js.errors.NotFoundError:
        raise Missing(key) from None
    return entry.value or b"", entry.revision or 0
