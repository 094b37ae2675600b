"""A tenant's storage as background streams check it: what the checks read from NATS, and what they
refuse."""

from __future__ import annotations

import asyncio
import contextlib
import io
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest

from headwater.gateway.jobs import tenant_storage
from headwater.gateway.jobs.background.events import EventWriter
from headwater.gateway.jobs.batches.files import Files
from headwater.gateway.jobs.durable import Durable
from headwater.gateway.jobs.tenant_storage import CACHE_SECONDS, TenantStorage
from headwater.gateway.storage_limits import StorageLimits
from headwater.gateway.tenancy.records import new_uid
from headwater.services.runtime.bus import Bus
from headwater.services.runtime.errors import StorageLimitExceeded

LIMIT = 100_000


@dataclass
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Uploader:
    """A tenant, and one gateway's view of what it keeps."""

    durable: Durable
    storage: TenantStorage
    bus: Bus
    clock: Clock
    tenant: str

    async def upload(self, num_bytes: int) -> str:
        async with self.storage.room(self.tenant, num_bytes):
            return await self.put(num_bytes)

    async def put(self, num_bytes: int) -> str:
        """As another gateway does it."""
        content = io.BytesIO(bytes(num_bytes))
        return (await Files(self.durable).add(self.tenant, "x", "batch", content, num_bytes)).id

    async def write(self, response_id: str, num_bytes: int) -> None:
        events = EventWriter(self.durable, self.tenant, response_id)
        events.add({"type": "response.output_text.done", "text": "x" * num_bytes})
        await events.flush()

    def num_received(self) -> int:
        """Messages that NATS has sent."""
        js = self.bus.jetstream()
        assert js is not None
        return js._nc.stats["in_msgs"]

    async def cost_of_check(self, num_streams: int = 1) -> int:
        before = self.num_received()
        await asyncio.gather(
            *(self.storage.check_events(self.tenant, 1) for _ in range(num_streams))
        )
        return self.num_received() - before


@pytest.fixture
async def ada(nats_url: str) -> AsyncIterator[Uploader]:
    async with Bus.open(nats_url) as bus:
        durable = Durable(bus)
        clock = Clock()
        storage = TenantStorage(durable, StorageLimits(LIMIT), clock=clock)
        yield Uploader(durable, storage, bus, clock, new_uid())


async def test_checks_of_background_streams_do_not_read_all_files_each_time(ada: Uploader) -> None:
    for _ in range(60):
        await ada.put(1)
    for i in range(3):
        await ada.write(f"r{i}", 10)
    assert await ada.cost_of_check() > 60
    # A consumer and its end, the count of what waits for it, three headers.
    assert await ada.cost_of_check() < 12
    assert await ada.cost_of_check(10) < 120
    ada.clock.now += CACHE_SECONDS + 1
    assert 60 < await ada.cost_of_check(10) < 200


async def test_a_tenant_over_its_limit_is_refused(ada: Uploader) -> None:
    await ada.upload(LIMIT // 2)
    await ada.storage.check_events(ada.tenant, LIMIT // 4)
    # Events count at once, whoever wrote them.
    await ada.write("r", LIMIT // 2)
    with pytest.raises(StorageLimitExceeded, match="file_bytes: the tenant keeps 100"):
        await ada.storage.check_events(ada.tenant, 1)


async def test_an_upload_here_counts_at_once_and_one_at_another_gateway_within_seconds(
    ada: Uploader,
) -> None:
    await ada.storage.check_events(ada.tenant, LIMIT // 2)
    file = await ada.upload(LIMIT * 3 // 4)
    with pytest.raises(StorageLimitExceeded):
        await ada.storage.check_events(ada.tenant, LIMIT // 2)
    await Files(ada.durable).delete(ada.tenant, file)
    await ada.storage.check_events(ada.tenant, LIMIT // 2)
    await ada.put(LIMIT * 3 // 4)
    ada.clock.now += CACHE_SECONDS + 1
    with pytest.raises(StorageLimitExceeded):
        await ada.storage.check_events(ada.tenant, LIMIT // 2)


async def test_room_for_uploads_is_counted_as_it_is_now(ada: Uploader) -> None:
    await ada.storage.check_events(ada.tenant, 1)
    await ada.put(LIMIT)
    with pytest.raises(StorageLimitExceeded):
        await ada.upload(1)


async def test_the_cache_is_bounded(ada: Uploader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tenant_storage, "MAX_CACHED_TENANTS", 2)
    tenants = [new_uid() for _ in range(3)]
    for tenant in [*tenants, tenants[1], tenants[0]]:
        with contextlib.suppress(StorageLimitExceeded):
            await ada.storage.check_events(tenant, 2 * LIMIT if tenant == tenants[1] else 1)
    assert list(ada.storage._cached) == [tenants[1], tenants[0]]
