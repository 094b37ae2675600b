"""A Valkey that tenants have filled to its last byte: limits stay exact, the index goes on, and
removing makes room."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from headwater.gateway.jobs import stored_bytes
from headwater.gateway.jobs.conversation_store import Conversation, Head
from headwater.gateway.jobs.response_store import KeptResponse, ResponseStore
from headwater.gateway.tenancy.limiter import Limiter
from headwater.gateway.tenancy.records import Limits, Scope
from headwater.services.index.column import IndexColumn, Owner
from headwater.services.index.slots import SlotTable
from headwater.services.runtime.errors import Unavailable
from headwater.services.runtime.store import Store
from headwater.services.stack.embedded import start_valkey

pytestmark = pytest.mark.usefixtures("patient_redis")

MAX_BYTES = 16 * 1024 * 1024
TEXT = "x" * 200_000


@pytest_asyncio.fixture
async def store(tmp_path: Path, kept: dict[str, Any]) -> AsyncIterator[Store]:
    server = await start_valkey(tmp_path, max_bytes=MAX_BYTES, **kept)
    try:
        async with Store.open(server.url) as opened:
            yield opened
    finally:
        await server.stop()


def response(name: str, text: str) -> KeptResponse:
    return KeptResponse(response={"id": name, "text": text}, input=[], conversation=[])


async def fill(store: Store) -> list[str]:
    """With responses of a tenant, smaller and smaller ones until not one byte more is taken."""
    responses = ResponseStore(store, 3600.0)
    names = list[str]()
    text = TEXT
    while True:
        if await responses.keep("abuser", response(name := f"resp_{len(names)}", text)):
            names.append(name)
        elif not text:
            return names
        else:
            text = text[: len(text) // 2]


async def first_refused(responses: ResponseStore) -> str:
    """Returns the first tenant whose conversation the full store refuses. The store may accept a
    few before, because Valkey frees the buffers of long requests a second or two later."""
    for tenant in (f"bob{number}" for number in range(10_000)):
        conversation = Conversation(
            id=f"conv_{tenant}", head=Head(created_at=0, metadata={}), items=[{"id": "a"}]
        )
        try:
            await responses.conversations.create(tenant, conversation)
        except Unavailable:
            return tenant
    raise AssertionError("the store is not full")


async def test_what_a_tenant_stores_ends_at_the_bound_and_takes_nothing_from_others(
    store: Store,
) -> None:
    responses = ResponseStore(store, 3600.0)
    limiter = Limiter(store)
    scopes = [Scope("tenant", Limits(requests_per_minute=5, concurrency=3, tokens_per_minute=100))]
    assert await responses.keep("ada", response("resp_ada", "kept"))
    assert (await limiter.reserve("ada", "before", scopes, most=10, least=10)).granted == 10
    names = await fill(store)
    assert len(names) > 20
    refused = await first_refused(responses)
    assert not await store.command("EXISTS", *stored_bytes._keys(refused)), (
        "what was refused counts as nothing"
    )
    assert (await responses.find("ada", "resp_ada")).response["text"] == "kept", (
        "nothing was evicted"
    )
    assert (await responses.find("abuser", names[0])).response["id"] == names[0]


async def test_limits_stay_exact_beside_a_full_store(store: Store) -> None:
    limiter = Limiter(store)
    scopes = [Scope("tenant", Limits(requests_per_minute=5, concurrency=3, tokens_per_minute=100))]
    assert (await limiter.reserve("ada", "before", scopes, most=10, least=10)).granted == 10
    for _ in range(3):
        assert (await limiter.count("ada", scopes)).refusal is None
    await fill(store)
    verdicts = [await limiter.reserve("ada", f"r{i}", scopes, most=10, least=10) for i in range(3)]
    refusals = [each.refusal.limit if each.refusal else "" for each in verdicts]
    assert refusals == ["", "", "concurrency"]
    for name in ("before", "r0", "r1"):
        await limiter.settle("ada", name, scopes, used=10, seq=0)
    refusals = [
        refusal.limit if (refusal := (await limiter.count("ada", scopes)).refusal) else ""
        for _ in range(3)
    ]
    assert refusals == ["", "", "requests"], "three of five were counted before"
    new = [Scope("tenant", Limits(requests_per_minute=1))]
    assert (await limiter.count("bob", new)).refusal is None, "a tenant that comes later too"
    assert (await limiter.count("bob", new)).refusal is not None


async def test_an_engine_keeps_its_column_and_writes_it_beside_a_full_store(store: Store) -> None:
    now = 0.0
    owner = Owner(replica_id="e0", epoch=7, address="127.0.0.1:1", capacity=100)
    column = IndexColumn(store, "0123456789abcdef", 0, owner, clock=lambda: now)
    blocks = [os.urandom(16) for _ in range(600)]
    column.add(blocks[0])
    while not await column.write():
        pass
    await fill(store)
    for block in blocks[1:]:
        column.add(block)
    column.drop(blocks[0])
    now += 2.0
    while not await column.write():
        pass
    [slot] = await SlotTable(store, "0123456789abcdef", 0).read()
    assert slot.is_live
    assert column.slot == slot.number
    assert len(column.blocks) == 599


async def test_removing_makes_room_again(store: Store) -> None:
    responses = ResponseStore(store, 3600.0)
    names = await fill(store)
    for name in names[:5]:
        await responses.drop("abuser", name)
    assert await responses.keep("ada", response("resp_ada", TEXT))
