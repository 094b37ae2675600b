"""A process with NATS's own password and no cluster token writes files, batches, answers and usage
in others' names."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import secrets
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import nats
import pytest
from nats.aio.client import Client
from nats.js.api import ObjectMeta
from redis.asyncio import Redis

from headwater.gateway.jobs.background.records import OVER, Record
from headwater.gateway.jobs.batches.ledger import JobName
from headwater.gateway.jobs.batches.records import Batch, Kept, new_id, now
from headwater.gateway.jobs.durable import BACKGROUND, BATCHES, CONTENTS, FILES
from headwater.gateway.tenancy.tenants import Tenant
from headwater.services.runtime import subjects
from headwater.services.runtime.cluster_key import ClusterKey
from headwater.services.runtime.usage_log import UsageRecord
from tests.gateway.processes import (
    MODEL,
    Gateway,
    engine_stage,
    gateway_stage,
    output_processor_stage,
    processor_stage,
    started,
)

TOKEN = secrets.token_hex(32)
KEY = ClusterKey([TOKEN])
ADMIN = {"authorization": "Bearer admin-key-of-the-house"}
SECRET = b"the secret of bob"
URL = "/v1/completions"
TURN = {"model": MODEL, "input": "x", "background": True, "max_output_tokens": 2}
TODAY = datetime.datetime.now(datetime.UTC) - datetime.timedelta(hours=1)


@pytest.fixture(scope="module")
def house(
    nats_url: str,
    shared_redis_url: str,
    text_folder: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Gateway]:
    token = tmp_path_factory.mktemp("access") / "token"
    token.write_text(TOKEN)
    common = (f"--nats-url={nats_url}", f"--cluster-token-file={token}")
    key = "--admin-key=admin-key-of-the-house"
    stages = (
        processor_stage(text_folder, *common),
        output_processor_stage(text_folder, *common),
        engine_stage(*common),
        gateway_stage(*common, f"--redis-url={shared_redis_url}", key),
    )
    with started(*stages), Gateway(stages[-1]) as gateway:
        gateway.wait_until(gateway.is_ready)
        yield gateway


class Customer:
    """A tenant with its key."""

    def __init__(self, house: Gateway, **limits: Any) -> None:
        self.house = house
        made = house.client.post(
            "/admin/tenants",
            json={"id": f"t-{uuid.uuid4().hex[:8]}", "limits": limits},
            headers=ADMIN,
        ).json()
        self.id = made["id"]
        self.uid = made["uid"]
        self.headers = {"authorization": f"Bearer {made['key']}"}
        house.wait_until(lambda: self.get("/v1/models").status_code == 200)

    @property
    def tenant(self) -> Tenant:
        return Tenant(id=self.id, uid=self.uid)

    def get(self, path: str) -> httpx.Response:
        return self.house.client.get(path, headers=self.headers)

    def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        return self.house.client.post(path, json=body, headers=self.headers)

    def upload(self, content: bytes) -> str:
        file = {"file": ("in.jsonl", content)}
        reply = self.house.client.post(
            "/v1/files", headers=self.headers, files=file, data={"purpose": "batch"}
        )
        return str(reply.json()["id"])

    @property
    def num_requests(self) -> int:
        rows = self.house.client.get(f"/admin/tenants/{self.id}/usage", headers=ADMIN).json()[
            "data"
        ]
        return sum(row["requests"] for row in rows)


@contextlib.asynccontextmanager
async def stranger_on(nats_url: str) -> AsyncIterator[Client]:
    stranger = await nats.connect(nats_url)
    try:
        yield stranger
    finally:
        await stranger.close()


async def put(stranger: Client, bucket: str, tenant: str, name: str, value: bytes) -> None:
    await (await stranger.jetstream().key_value(bucket)).put(
        f"{subjects.key_of(tenant)}.{name}", value
    )


async def test_a_file_record_that_names_another_tenant_s_content_opens_nothing(
    nats_url: str, house: Gateway
) -> None:
    eve, bob = await asyncio.to_thread(Customer, house), await asyncio.to_thread(Customer, house)
    file_id = await asyncio.to_thread(bob.upload, SECRET)
    card = bob.get(f"/v1/files/{file_id}").json()
    async with stranger_on(nats_url) as stranger:
        await put(stranger, FILES, eve.uid, file_id, msgspec.json.encode(card))
        # A record that is signed, for bob.
        theirs = await (await stranger.jetstream().key_value(FILES)).get(
            f"{subjects.key_of(bob.uid)}.{file_id}"
        )
        await put(stranger, FILES, eve.uid, file_id, theirs.value or b"")
    reply = await asyncio.to_thread(eve.get, f"/v1/files/{file_id}/content")
    assert (reply.status_code, SECRET in reply.content) == (404, False)
    assert eve.get("/v1/files").json()["data"] == []
    assert bob.get(f"/v1/files/{file_id}/content").content == SECRET


async def test_no_request_runs_in_the_name_of_a_tenant_that_did_not_ask(
    nats_url: str, house: Gateway
) -> None:
    bob = await asyncio.to_thread(Customer, house)
    line = {
        "custom_id": "1",
        "method": "POST",
        "url": URL,
        "body": {"model": MODEL, "prompt": "x", "max_tokens": 1},
    }
    file_id = await asyncio.to_thread(bob.upload, msgspec.json.encode(line))
    batch = Batch(
        id=new_id("batch_"),
        endpoint=URL,
        input_file_id=file_id,
        completion_window="1h",
        created_at=now(),
        expires_at=now() + 3600,
    )
    response = {
        "id": f"resp_{uuid.uuid4().hex}",
        "status": "queued",
        "created_at": now(),
        "store": True,
    }
    body = msgspec.json.encode(
        {"model": MODEL, "input": "What did bob say?", "background": True, "max_output_tokens": 2}
    )
    record = Record(
        tenant=bob.tenant,
        priority=0,
        request_id=uuid.uuid4().hex,
        body=body,
        is_streamed=False,
        response=response,
    )
    async with stranger_on(nats_url) as stranger:
        js = stranger.jetstream()
        await put(
            stranger, BATCHES, bob.uid, batch.id, msgspec.json.encode(Kept.of(batch, bob.tenant))
        )
        await js.publish(subjects.BATCH_JOBS, msgspec.json.encode(JobName(bob.uid, batch.id)))
        await put(stranger, BACKGROUND, bob.uid, record.id, msgspec.msgpack.encode(record))
        name = {"tenant": bob.uid, "response_id": record.id}
        await js.publish(subjects.BACKGROUND_JOBS, msgspec.msgpack.encode(name))
    # Both queues are read in order: what bob asks for himself is done after.
    own = (await asyncio.to_thread(bob.post, "/v1/responses", TURN)).json()
    asked = {"input_file_id": file_id, "endpoint": URL, "completion_window": "24h"}
    mine = (await asyncio.to_thread(bob.post, "/v1/batches", asked)).json()

    def are_done() -> bool:
        return (
            bob.get(f"/v1/responses/{own['id']}").json().get("status") in OVER
            and bob.get(f"/v1/batches/{mine['id']}").json().get("status") == "completed"
        )

    await asyncio.to_thread(house.wait_until, are_done)
    await asyncio.to_thread(house.wait_until, lambda: bob.num_requests >= 2)
    assert bob.get(f"/v1/batches/{batch.id}").status_code == 404
    assert bob.get(f"/v1/responses/{record.id}").status_code == 404
    assert bob.num_requests == 2


async def test_content_that_was_exchanged_is_not_run_as_its_tenant_s(
    nats_url: str, house: Gateway
) -> None:
    bob = await asyncio.to_thread(Customer, house)
    line = {
        "custom_id": "1",
        "method": "POST",
        "url": URL,
        "body": {"model": MODEL, "prompt": "x", "max_tokens": 1},
    }
    file_id = await asyncio.to_thread(bob.upload, msgspec.json.encode(line))
    async with stranger_on(nats_url) as stranger:
        store = await stranger.jetstream().object_store(CONTENTS)
        await store.put(
            file_id, msgspec.json.encode(line | {"custom_id": "forged"}), meta=ObjectMeta()
        )
    asked = {"input_file_id": file_id, "endpoint": URL, "completion_window": "24h"}
    made = (await asyncio.to_thread(bob.post, "/v1/batches", asked)).json()
    path = f"/v1/batches/{made['id']}"
    batch = await asyncio.to_thread(
        house.first,
        lambda: bob.get(path).json(),
        lambda each: each.get("status") in ("failed", "completed"),
    )
    assert (batch["status"], batch["errors"]["data"][0]["code"]) == ("failed", "invalid_input_file")
    assert bob.get(f"/v1/files/{file_id}/content").status_code == 404


async def test_forged_usage_gives_back_no_budget_that_is_counted_anew(
    nats_url: str, shared_redis_url: str, house: Gateway
) -> None:
    eve = await asyncio.to_thread(Customer, house, budget=60, budget_period="day")
    asked = {"model": MODEL, "prompt": list(range(500, 540)), "max_tokens": 4, "ignore_eos": True}
    assert (await asyncio.to_thread(eve.post, URL, asked)).status_code == 200
    refused = await asyncio.to_thread(eve.post, URL, asked)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "insufficient_quota")
    await asyncio.to_thread(house.wait_until, lambda: eve.num_requests == 1)
    forged = UsageRecord(
        request_id=uuid.uuid4().hex, tenant=eve.uid, model=MODEL, at=time.time(), prompt_tokens=-60
    )
    async with stranger_on(nats_url) as stranger:
        await stranger.jetstream().publish(subjects.usage(eve.uid), msgspec.json.encode(forged))
    async with Redis.from_url(shared_redis_url) as redis:
        await redis.flushall()
    again = await asyncio.to_thread(eve.post, URL, asked)
    assert (again.status_code, again.json()["error"]["code"]) == (429, "insufficient_quota")
    assert eve.num_requests == 1
