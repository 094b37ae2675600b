"""The catalogue of adapters, which outlives every process: one record a name in a key-value bucket
of JetStream. Without NATS it lives as long as its gateway.

A gateway reads it when it starts, when another gateway has changed it, and once a minute. Records
that the cluster's key did not sign are ignored. Knows nothing about engines.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterable

import msgspec
import nats.js.errors
import structlog
from nats.js.api import KeyValueConfig, StorageType

from headwater.services.runtime import subjects
from headwater.services.runtime.bus import Bus, Subscription
from headwater.services.runtime.errors import NotFound, Unavailable
from headwater.services.runtime.listeners import call_each
from headwater.services.runtime.record_seal import RecordSeals
from headwater.services.runtime.tasks import owned_task, set_within

from ..buckets import FAILURES, or_unavailable
from ..signed_bucket import SignedBucket
from ..tenancy.tenants import Tenant
from .records import OPERATOR, AdapterRecord

BUCKET = "headwater_adapters"
READ_AGAIN_SECONDS = 60.0
RETRY_SECONDS = 1.0
MAX_RETIRED = 1024
"""Records that were replaced or dropped and are remembered, for requests that began with them."""
_records = msgspec.json.Decoder(AdapterRecord)


class AdapterCatalogue:
    """Use within `running`."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._seals = RecordSeals(BUCKET)
        self._bucket: SignedBucket | None = None
        self._records: dict[tuple[str, str], AdapterRecord] = {}
        """Records by owner and name."""
        self._retired: OrderedDict[tuple[str, bytes], AdapterRecord] = OrderedDict()
        """The youngest comes last."""
        self._changed = asyncio.Event()
        self._changing = asyncio.Lock()
        """Held while records are read or written: what an earlier read found replaces no newer
        record."""
        self._listeners: list[Callable[[], None]] = []

    async def make(self) -> None:
        """Makes the bucket, unless it is there, and signs records again that were signed with an
        earlier token. Raises as `put`."""
        with or_unavailable():
            await (await self._open()).sign_all()

    @property
    def is_durable(self) -> bool:
        """Whether there is a NATS, so that all gateways have the same records."""
        return self._bus.url is not None

    def on_change(self, listener: Callable[[], None]) -> None:
        self._listeners.append(listener)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[AdapterCatalogue]:
        """Follows the bucket inside the `with` block, which begins with the records that are
        there."""
        if not self.is_durable:
            yield self
            return
        self._bus.on_connected(self._changed.set)
        async with self._bus.subscribe(subjects.ADAPTERS_CHANGED) as words:
            await self.read()
            async with owned_task(self._follow_changes(words)), owned_task(self._follow()):
                yield self

    @property
    def records(self) -> list[AdapterRecord]:
        """Records of all adapters, the operator's first."""
        return [self._records[key] for key in sorted(self._records)]

    def find(self, tenant: Tenant, name: str) -> AdapterRecord | None:
        """The adapter of a name: the tenant's own, or one of the operator's that it may use."""
        own = self._records.get((tenant.key, name))
        if own is not None:
            return own
        record = self._records.get((OPERATOR, name))
        return record if record is not None and record.may_use(tenant) else None

    def owned(self, owner: str, name: str) -> AdapterRecord | None:
        return self._records.get((owner, name))

    def owned_by(self, owner: str) -> list[AdapterRecord]:
        return [each for each in self.records if each.owner == owner]

    def seen_by(self, tenant: Tenant) -> dict[str, AdapterRecord]:
        """Adapters that a tenant may use, by name."""
        usable = (each for each in self.records if each.may_use(tenant))
        return {each.name: each for each in usable}

    def by_digest(self, base: str, digest: bytes) -> AdapterRecord | None:
        """A record with that content, also one that was replaced or dropped recently."""
        found = (
            each for each in self._records.values() if (each.base, each.digest) == (base, digest)
        )
        return next(found, None) or self._retired.get((base, digest))

    def has_content(self, digest: bytes) -> bool:
        """Whether a name stands for the content."""
        return any(each.digest == digest for each in self._records.values())

    def was_dropped(self, digest: bytes) -> bool:
        """Whether a name stood for the content while this gateway ran."""
        return any(known == digest for _, known in self._retired)

    async def put(self, record: AdapterRecord) -> None:
        """Writes a record in the place of the one before. Raises `Unavailable`."""
        async with self._changing:
            if self.is_durable:
                with or_unavailable():
                    bucket = await self._open()
                    await bucket.put(_key(record.owner, record.name), msgspec.json.encode(record))
            self._take([*self._but(record.owner, record.name), record])
        await self._publish_change()

    async def drop(self, owner: str, name: str) -> AdapterRecord:
        """Drops a record, also while storage is full. Raises `NotFound`, `Unavailable`."""
        if self.is_durable:
            await self.read()
        record = self._records.get((owner, name))
        if record is None:
            raise NotFound("adapter", name)
        async with self._changing:
            if self.is_durable:
                with or_unavailable():
                    await (await self._open()).drop(_key(owner, name))
            self._take(self._but(owner, name))
        await self._publish_change()
        return record

    async def read(self) -> bool:
        """Reads the records. Returns False if they cannot be read; the known records stay then."""
        async with self._changing:
            try:
                bucket = await self._open()
                found = [_records.decode(value) async for _, value in bucket.all(">")]
            except (*FAILURES, Unavailable, msgspec.MsgspecError) as failure:
                self._bucket = None
                structlog.get_logger().warning(
                    "adapters cannot be read", error=repr(failure), known=len(self._records)
                )
                return False
            self._take(found)
        return True

    def _but(self, owner: str, name: str) -> list[AdapterRecord]:
        """Records of all adapters but one."""
        return [each for key, each in self._records.items() if key != (owner, name)]

    async def _publish_change(self) -> None:
        """Publishes a change, so that other gateways read what this one has written."""
        await self._bus.publish(subjects.ADAPTERS_CHANGED, b"")

    def _take(self, records: Iterable[AdapterRecord]) -> None:
        before = self._records
        self._records = {(each.owner, each.name): each for each in records}
        if before == self._records:
            return
        for record in before.values():
            if not self.has_content(record.digest):
                self._retired[record.base, record.digest] = record
        for record in self._records.values():
            self._retired.pop((record.base, record.digest), None)
        while len(self._retired) > MAX_RETIRED:
            self._retired.popitem(last=False)
        call_each(self._listeners)

    async def _follow_changes(self, words: Subscription) -> None:
        async for _ in words:
            self._changed.set()

    async def _follow(self) -> None:
        while True:
            await set_within(self._changed, READ_AGAIN_SECONDS)
            self._changed.clear()
            if not await self.read():
                await asyncio.sleep(RETRY_SECONDS)
                self._changed.set()

    async def _open(self) -> SignedBucket:
        """The bucket, which is made where it is missing. Raises `Unavailable`, and what NATS
        raises."""
        js = self._bus.jetstream()
        if js is None:
            raise Unavailable("adapters need NATS with JetStream", code="storage_unavailable")
        if self._bucket is None:
            try:
                bucket = await js.key_value(BUCKET)
            except nats.js.errors.NotFoundError:
                config = KeyValueConfig(bucket=BUCKET, storage=StorageType.FILE)
                bucket = await js.create_key_value(config)
            self._bucket = SignedBucket(js, bucket, self._seals)
        return self._bucket


def _key(owner: str, name: str) -> str:
    """Key of a record. NATS allows no empty word."""
    return f"{owner.encode().hex() or 'operator'}.{name.encode().hex()}"
