"""Usage records of requests, one each in a stream of JetStream, by tenant, counted once however
often it is sent.

Gateways write them; an output processor writes those of a gateway that died, under the same id.
While NATS is away records wait here, within a bound. Records that no cluster key signed are not
counted. Knows nothing about limits.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass

import msgspec
import nats.js.errors
import structlog
from nats.js import JetStreamContext
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy, PubAck, StorageType, StreamConfig

from . import subjects
from .bus import FAILURES, Bus
from .listeners import call_each
from .pending_messages import pending_messages
from .record_seal import RecordSeals
from .tasks import owned_task

MSG_ID = "Nats-Msg-Id"
STREAM = "headwater_usage"
AUDIT_STREAM = "headwater_audit"
KEPT_SECONDS = 400 * 86_400.0
SAME_SECONDS = 24 * 3600.0
"""Seconds within which a record with the same request id is the same record."""
MAX_WAITING = 100_000
ACK_SECONDS = 0.1
"""Seconds that the end of a request waits for its record to be stored."""
LAST_SECONDS = 2.0
"""Seconds for which records that still wait are sent when the gateway stops."""
RETRY_SECONDS = 0.5
PAGE = 512
SEAL = "Headwater-Seal"
"""Header of a record with its seal. The record itself is plain JSON."""
_ADOPTED = f"{subjects.USAGE}.adopted"
"""Subject, of no tenant, of the signed number up to which records without a seal are trusted."""
LEFT = "left"
"""Outcome of a request whose gateway died, as far as its output processor knows. The counts may be
too low if that gateway still lives."""


class UsageRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One request, however many prompts it had."""

    request_id: str
    tenant: str
    model: str
    at: float
    """Time of the request's end, seconds since 1970."""
    key_id: str = ""
    prompts: int = 1
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    seconds: float = 0.0
    outcome: str = "done"
    gateway: str = ""

    @property
    def num_tokens(self) -> int:
        return self.prompt_tokens + self.output_tokens

    def beyond(self, other: UsageRecord) -> UsageRecord | None:
        """The part of this record that the other one lacks, as a separate record; None: it lacks
        nothing."""
        names = ("prompts", "prompt_tokens", "cached_tokens", "output_tokens")
        more = {name: max(0, getattr(self, name) - getattr(other, name)) for name in names}
        return (
            msgspec.structs.replace(self, request_id=f"{self.request_id}+", **more)
            if any(more.values())
            else None
        )


class UsageLeft(msgspec.Struct, frozen=True):
    """Usage of a request whose gateway died, for the gateways that keep the limits."""

    request_id: str
    tenant: str
    used: int
    """Number of tokens."""
    seq: int
    """Number of its usage record."""


_records = msgspec.json.Decoder(UsageRecord)
_left = msgspec.json.Decoder(UsageLeft)
OnStored = Callable[[int], None]
"""Called with the number under which a record is stored; 0 where there is no NATS to store it."""


@dataclass(slots=True)
class _Waiting:
    record: UsageRecord
    on_stored: OnStored


class UsageLog:
    """Usage log of a process. Writes within `running`; reads whenever there is a NATS."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._seals = RecordSeals(STREAM)
        self._waiting: deque[_Waiting] = deque()
        self._num_dropped = 0
        self._arrived = asyncio.Event()
        self._is_made = False

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[UsageLog]:
        """Scope of writing; leaving waits a moment for records that are still to be written."""
        async with owned_task(self._write()):
            try:
                yield self
            finally:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LAST_SECONDS if self._bus.connected else 0):
                        while self._waiting:  # noqa: ASYNC110 (the end of a process)
                            await asyncio.sleep(0.01)
        if self._waiting:
            structlog.get_logger().error(
                "usage records lost: NATS is away", count=len(self._waiting)
            )

    @property
    def is_kept(self) -> bool:
        """Whether there is a NATS, reachable now or not."""
        return self._bus.url is not None

    def add(self, record: UsageRecord, on_stored: OnStored) -> None:
        """Adds a record without waiting. Of records that wait too long for NATS the oldest are
        dropped."""
        if not self.is_kept:
            on_stored(0)
            return
        if len(self._waiting) >= MAX_WAITING:
            self._waiting.popleft()
            if self._num_dropped % 1000 == 0:
                structlog.get_logger().error(
                    "usage records dropped: NATS is away", dropped=self._num_dropped + 1
                )
            self._num_dropped += 1
        self._waiting.append(_Waiting(record, on_stored))
        self._arrived.set()

    async def stored(self, record: UsageRecord, on_stored: OnStored) -> int:
        """Adds a record; returns the number under which it is stored, 0 where that is not known
        soon."""
        if not self._bus.connected:
            self.add(record, on_stored)
            return 0
        acked: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        def on_ack(seq: int) -> None:
            on_stored(seq)
            if not acked.done():
                acked.set_result(seq)

        self.add(record, on_ack)
        try:
            async with asyncio.timeout(ACK_SECONDS):
                return await acked
        except TimeoutError:
            return 0

    async def _write(self) -> None:
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            while self._waiting:
                waiting = self._waiting[0]
                seq = 0
                try:
                    seq = await self._publish(waiting.record)
                except FAILURES:
                    await asyncio.sleep(RETRY_SECONDS)
                    continue
                except Exception as fault:
                    # The record would fail again, and all later records would wait for it.
                    facts = msgspec.structs.asdict(waiting.record)
                    structlog.get_logger().error("usage record lost", record=facts, exc_info=fault)
                # The oldest may have been dropped meanwhile.
                if self._waiting and self._waiting[0] is waiting:
                    self._waiting.popleft()
                if seq:
                    call_each([waiting.on_stored], seq)

    async def _publish(self, record: UsageRecord) -> int:
        js = _jetstream(self._bus)
        if not self._is_made:
            await self.make()
            self._is_made = True
        ack = await self._put(js, record)
        if ack.duplicate and record.outcome != LEFT:
            # A gateway that was taken for dead adds the tokens that the stored record lacks.
            there = await _stored_record(js, ack.seq)
            if (
                there is not None
                and there.outcome == LEFT
                and (more := record.beyond(there)) is not None
            ):
                await self._put(js, more)
        return ack.seq

    async def _put(self, js: JetStreamContext, record: UsageRecord) -> PubAck:
        subject = subjects.usage(record.tenant)
        data = msgspec.json.encode(record)
        headers = {
            MSG_ID: self._seals.name_of(record.request_id),
            SEAL: self._seals.code(subject, data).decode(),
        }
        return await js.publish(subject, data, headers=headers)

    async def publish_left(self, record: UsageRecord, seq: int) -> None:
        """Tells every running gateway that a record of a dead one is stored."""
        left = UsageLeft(record.request_id, record.tenant, record.num_tokens, seq)
        await self._bus.publish(subjects.USAGE_LEFT, msgspec.json.encode(left))

    async def left(self) -> AsyncIterator[UsageLeft]:
        """Yields the usage that output processors report, for ever."""
        async with self._bus.subscribe(subjects.USAGE_LEFT) as messages:
            async for _, left in messages.decoded(_left.decode, "usage of a dead gateway"):
                yield left

    async def make(self) -> None:
        """Makes the stream, unless it is there. Raises what NATS raises."""
        await make_stream(_jetstream(self._bus), STREAM, f"{subjects.USAGE}.>")

    async def read(
        self, tenant: str, since: datetime.datetime
    ) -> AsyncIterator[tuple[int, UsageRecord]]:
        """Records of a tenant since a moment, oldest first, each with its number. Raises what NATS
        raises."""
        subject = subjects.usage(tenant)
        num_adopted = await self._num_adopted()
        async for message in read_stream(self._bus, STREAM, subject, since):
            code = message.headers.get(SEAL, "").encode()
            if (not code and message.seq <= num_adopted) or self._seals.open_beside(
                subject, code, message.data
            ):
                yield message.seq, _records.decode(message.data)

    async def adopt(self) -> None:
        """Makes stored records without a seal trusted from now on: an earlier version wrote them.
        Done once; the mark goes when the records do. Raises what NATS raises."""
        js = _jetstream(self._bus)
        if not await self._num_adopted():
            data = b"%d" % (await js.stream_info(STREAM)).state.last_seq
            await js.publish(
                _ADOPTED, data, headers={SEAL: self._seals.code(_ADOPTED, data).decode()}
            )

    async def _num_adopted(self) -> int:
        """Number of the last record that is trusted without a seal."""
        js = _jetstream(self._bus)
        try:
            message = await js.get_last_msg(STREAM, _ADOPTED)
        except nats.js.errors.NotFoundError:
            return 0
        code = (message.headers or {}).get(SEAL, "").encode()
        opened = self._seals.open_beside(_ADOPTED, code, message.data or b"")
        return int(opened.value) if opened is not None else 0


def _jetstream(bus: Bus) -> JetStreamContext:
    """Raises `ConnectionError` while nothing is connected."""
    if (js := bus.jetstream()) is None:
        raise ConnectionError("NATS is away")
    return js


async def _stored_record(js: JetStreamContext, seq: int) -> UsageRecord | None:
    """The record of a number; None where it is gone or cannot be read."""
    try:
        return _records.decode((await js.get_msg(STREAM, seq)).data or b"")
    except nats.js.errors.NotFoundError:
        return None
    except msgspec.DecodeError as error:
        structlog.get_logger().error(
            "a stored usage record cannot be read", seq=seq, error=str(error)
        )
        return None


async def make_stream(js: JetStreamContext, name: str, subject: str) -> None:
    """Makes a stream, unless it is there."""
    try:
        await js.stream_info(name)
    except nats.js.errors.NotFoundError:
        config = StreamConfig(
            name=name,
            subjects=[subject],
            storage=StorageType.FILE,
            max_age=KEPT_SECONDS,
            duplicate_window=SAME_SECONDS,
        )
        await js.add_stream(config)


@dataclass(frozen=True, slots=True)
class Stored:
    """A message of a stream."""

    seq: int
    data: bytes
    headers: Mapping[str, str]


async def read_stream(
    bus: Bus, stream: str, subject: str, since: datetime.datetime
) -> AsyncIterator[Stored]:
    """The messages of a subject up to now. Raises what NATS raises."""
    js = _jetstream(bus)
    consumer = ConsumerConfig(
        deliver_policy=DeliverPolicy.BY_START_TIME,
        opt_start_time=since.astimezone(datetime.UTC).isoformat().replace("+00:00", "Z"),  # type: ignore[arg-type]
        ack_policy=AckPolicy.NONE,
        inactive_threshold=30.0,
        mem_storage=True,
    )
    try:
        messages = pending_messages(
            await js.pull_subscribe(subject, stream=stream, config=consumer), PAGE
        )
    except nats.js.errors.NotFoundError:
        # The stream has no record yet.
        return
    async with contextlib.aclosing(messages):
        async for message in messages:
            yield Stored(message.metadata.sequence.stream, message.data, message.headers or {})
