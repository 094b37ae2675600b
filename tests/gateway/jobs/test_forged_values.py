"""A stranger's usage records, results and contents, as their readers see them; and what an earlier
version left."""

from __future__ import annotations

import asyncio
import io
import secrets
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from headwater.gateway.jobs.background.ledger import BackgroundLedger
from headwater.gateway.jobs.background.records import Record
from headwater.gateway.jobs.batches.files import Files
from headwater.gateway.jobs.batches.ledger import Ledger
from headwater.gateway.jobs.batches.line_caller import LineCaller
from headwater.gateway.jobs.batches.range_runner import RangeRunner
from headwater.gateway.jobs.batches.records import Batch, Kept, Result, new_id, now
from headwater.gateway.jobs.batches.results import MAX_VALUE_BYTES, Results
from headwater.gateway.jobs.batches.run import Run
from headwater.gateway.jobs.durable import CONTENTS, RESULTS, Durable
from headwater.gateway.jobs.tenant_storage import TenantStorage
from headwater.gateway.storage_limits import StorageLimits
from headwater.gateway.tenancy.tenants import Tenant
from headwater.services.runtime import cluster_key, subjects
from headwater.services.runtime.bus import Bus
from headwater.services.runtime.cluster_key import ClusterKey
from headwater.services.runtime.errors import NotFound
from headwater.services.runtime.usage_log import UsageLog, UsageRecord
from tests.gateway.jobs.test_forged_jobs import SECRET, TODAY, URL, stranger_on

KEY = ClusterKey([secrets.token_hex(32)])


@pytest.fixture
async def bus(nats_url: str) -> AsyncIterator[Bus]:
    with cluster_key.using(KEY):
        async with Bus.open(nats_url) as bus:
            yield bus


def made_with(key: ClusterKey | None, make: Any, *args: Any, **more: Any) -> Any:
    with cluster_key.using(key):
        return make(*args, **more)


async def test_an_unsigned_record_does_not_stop_requests_from_being_counted(
    nats_url: str, bus: Bus
) -> None:
    log = made_with(KEY, UsageLog, bus)
    tenant = f"t-{uuid.uuid4().hex}"
    record = UsageRecord(
        request_id=uuid.uuid4().hex, tenant=tenant, model="m", at=time.time(), output_tokens=9
    )
    stored: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    async with stranger_on(nats_url) as stranger, log.running(), asyncio.timeout(60):
        await log.make()
        nothing = msgspec.json.encode(msgspec.structs.replace(record, output_tokens=0))
        headers = {"Nats-Msg-Id": record.request_id}
        await stranger.jetstream().publish(subjects.usage(tenant), nothing, headers=headers)
        log.add(record, stored.set_result)
        await stored
        assert [each async for _, each in log.read(tenant, TODAY)] == [record]


class Answering:
    """A gateway's surface that answers every line with its prompt."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body = msgspec.json.decode((await receive())["body"])
        await send(
            {"type": "http.response.start", "status": 200, "headers": [(b"x-request-id", b"r1")]}
        )
        await send(
            {"type": "http.response.body", "body": msgspec.json.encode({"text": body["prompt"]})}
        )


async def test_results_that_a_stranger_writes_are_no_answers(nats_url: str, bus: Bus) -> None:
    durable = made_with(KEY, Durable, bus)
    tenant = uuid.uuid4().hex
    files = Files(durable)
    ledger = Ledger(durable)
    secret = await files.add("bob", "secret", "batch", io.BytesIO(SECRET), len(SECRET))
    lines = [
        {
            "custom_id": f"{i}",
            "method": "POST",
            "url": URL,
            "body": {"prompt": f"p{i}" * ((i == 1 and MAX_VALUE_BYTES) or 1)},
        }
        for i in range(3)
    ]
    content = b"".join(msgspec.json.encode(each) + b"\n" for each in lines)
    file = await files.add(tenant, "in.jsonl", "batch", io.BytesIO(content), len(content))
    batch = Batch(
        id=new_id("batch_"),
        endpoint=URL,
        input_file_id=file.id,
        completion_window="1h",
        created_at=now(),
        expires_at=now() + 3600,
    )
    kept = Kept(batch=batch, tenant=tenant, weight=1.0, tier=0)
    await ledger.add(kept)
    lie = msgspec.json.encode(Result(id="forged", custom_id="0", error=None))
    async with stranger_on(nats_url) as stranger:
        results = await stranger.jetstream().key_value(RESULTS)
        await results.put(f"{batch.id}.1", lie)
        await results.put(f"{batch.id}.3", b"@" + secret.id.encode())
    storage = TenantStorage(durable, StorageLimits())
    caller = LineCaller(Answering(), concurrency=2, registry=CollectorRegistry())
    async with asyncio.timeout(60), RangeRunner(durable, caller).running():
        done = await Run(storage, tenant, batch.id, max_line_bytes=4 * MAX_VALUE_BYTES).to_its_end()
    assert (done.status, done.request_counts.completed) == ("completed", 3)
    assert done.output_file_id is not None
    async with files.opened(tenant, done.output_file_id) as output:
        answered = {each["custom_id"]: each for each in map(msgspec.json.decode, output)}
    assert [answered[f"{i}"]["response"]["body"]["text"][:2] for i in range(3)] == [
        "p0",
        "p1",
        "p2",
    ]
    assert SECRET.decode() not in str(answered)


async def test_a_result_that_lies_elsewhere_and_was_exchanged_there_is_none(
    nats_url: str, bus: Bus
) -> None:
    durable = made_with(KEY, Durable, bus)
    batch_id = new_id("batch_")
    results = Results(durable)
    large = Result(id="1", custom_id="x" * MAX_VALUE_BYTES)
    assert await results.keep(batch_id, 1, large)
    assert [number async for number, _, _ in results.all(batch_id)] == [1]
    rooms = await durable.rooms()
    [name] = [value.decode() async for _, value in rooms.results.all(f"large.{batch_id}.>")]
    async with stranger_on(nats_url) as stranger:
        store = await stranger.jetstream().object_store(CONTENTS)
        await store.put(name, msgspec.json.encode(Result(id="forged", custom_id="x")))
    assert [number async for number, _, _ in results.all(batch_id)] == []
    await results.drop(batch_id)


async def test_what_an_earlier_version_kept_is_signed_once_and_believed_from_then_on(
    nats_url: str,
) -> None:
    tenant = f"t-{uuid.uuid4().hex}"
    record = UsageRecord(
        request_id=uuid.uuid4().hex, tenant=tenant, model="m", at=time.time(), output_tokens=9
    )
    response = {
        "id": f"resp_{uuid.uuid4().hex}",
        "status": "queued",
        "created_at": now(),
        "store": True,
    }
    stored: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    async with Bus.open(nats_url) as bus, asyncio.timeout(60):
        before = Durable(bus)
        file = await Files(before).add(tenant, "old", "batch", io.BytesIO(b"old"), 3)
        await BackgroundLedger(before).add(
            Record(
                tenant=Tenant(id=tenant),
                priority=0,
                request_id="r",
                body=b"{}",
                is_streamed=False,
                response=response,
            )
        )
        async with UsageLog(bus).running() as log:
            log.add(record, stored.set_result)
            await stored
        strict = made_with(KEY, Durable, bus)
        assert await Files(strict).all(tenant) == []
        assert [each async for _, each in made_with(KEY, UsageLog, bus).read(tenant, TODAY)] == []
        await made_with(KEY, Durable, bus, adopts_unsigned=True).sign_all()
        adopting = made_with(KEY, UsageLog, bus)
        await adopting.adopt()
        assert await Files(strict).all(tenant) == [file]
        async with Files(strict).opened(tenant, file.id) as content:
            assert content.read() == b"old"
        assert (await BackgroundLedger(strict).get(tenant, response["id"])).response == response
        # What comes later without a signature is still refused, also after another gateway that
        # adopts.
        js = bus.jetstream()
        assert js is not None
        await js.publish(subjects.usage(tenant), msgspec.json.encode(record))
        await adopting.adopt()
        assert [each async for _, each in made_with(KEY, UsageLog, bus).read(tenant, TODAY)] == [
            record
        ]
        await BackgroundLedger(strict).drop(tenant, response["id"])
        await Files(strict).delete(tenant, file.id)
        with pytest.raises(NotFound):
            await Files(strict).get(tenant, file.id)
