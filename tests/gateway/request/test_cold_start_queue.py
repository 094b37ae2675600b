"""Requests that wait for a replica: how long, how many, and what ends the wait."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from headwater.gateway.request.cold_start_queue import ColdStartQueue
from headwater.gateway.stages.catalogues import Catalogues
from headwater.gateway.tenancy.tenants import Tenant
from headwater.proto.events_pb2 import Catalogue, CatalogueEntry
from headwater.proto.events_pb2 import Demand as DemandWord
from headwater.services.runtime import subjects
from headwater.services.runtime.bus import Bus
from headwater.services.runtime.errors import LimitExceeded, NotFound, Unavailable

MODEL = "m"


class There:
    """What is there of a model."""

    def __init__(self, bus: Bus | None = None, **given: Any) -> None:
        self.text = True
        self.replica = False
        self.bus = bus or Bus(None)
        self.catalogues = Catalogues(self.bus)
        options: dict[str, Any] = {"patience": 60.0, "max_waiting": 2} | given
        self.demand = ColdStartQueue(
            self.bus,
            "gateway-0",
            self.catalogues,
            is_served=lambda model: self.text,
            has_replica=lambda model: self.replica,
            **options,
        )

    async def replica_comes(
        self, tenant: str = "open", tier: int = 0, virtual_time: float = 0.0
    ) -> None:
        await self.demand.replica(
            MODEL, tenant=Tenant(id=tenant), tier=tier, virtual_time=virtual_time
        )

    async def text_comes(self) -> None:
        await self.demand.text_stages(MODEL, tenant=Tenant(id="open"), tier=0)

    def receive(self, **entry: Any) -> None:
        models = [CatalogueEntry(model=MODEL, **entry)] if entry else []
        self.catalogues.on_catalogue(Catalogue(supervisor_id="s", models=models))


async def begun(work: Any) -> asyncio.Task[None]:
    task: asyncio.Task[None] = asyncio.create_task(work)
    await asyncio.sleep(0)
    return task


async def test_a_request_waits_until_a_replica_is_there_and_no_more_than_allowed_wait() -> None:
    there = There()
    first, second = await begun(there.replica_comes()), await begun(there.replica_comes())
    assert there.demand.waiting == {MODEL: 2}
    with pytest.raises(LimitExceeded, match="2 requests are already waiting"):
        await there.replica_comes()
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)
    assert there.demand.waiting == {MODEL: 1}
    there.demand.look_again()
    await asyncio.sleep(0)
    assert not first.done()
    there.replica = True
    there.demand.look_again()
    await first
    await there.replica_comes()


async def test_a_tenant_that_fills_the_queue_makes_room_for_others_and_they_go_on_by_tier_and_virtual_time() -> (
    None
):
    there = There(max_waiting=4)
    ended: list[str] = []

    async def request(name: str, tenant: str, tier: int, virtual_time: float) -> None:
        try:
            await there.replica_comes(tenant, tier, virtual_time)
            ended.append(name)
        except LimitExceeded:
            ended.append(f"{name} refused")

    waiting = [await begun(request(f"flood {i}", "flood", 0, 10.0 * i)) for i in range(5)]
    assert ended == ["flood 4 refused"]
    waiting.append(await begun(request("late", "late", 0, 5.0)))
    waiting.append(await begun(request("low", "low", 1, 0.0)))
    await asyncio.gather(waiting[2], waiting[3])
    assert ended == ["flood 4 refused", "flood 3 refused", "flood 2 refused"]
    assert there.demand.waiting == {MODEL: 4}
    there.replica = True
    there.demand.look_again()
    await asyncio.gather(*waiting)
    assert ended[3:] == ["flood 0", "late", "flood 1", "low"]
    assert there.demand.waiting == {MODEL: 0}


async def test_a_replica_that_has_left_before_a_request_goes_on_is_waited_for_again() -> None:
    there = There(max_waiting=3)
    waiting = [await begun(there.replica_comes(tenant)) for tenant in ("a", "b")]
    there.replica = True
    there.demand.look_again()
    there.replica = False
    newcomer = await begun(there.replica_comes("c"))
    for _ in range(20):
        await asyncio.sleep(0)
    assert not any(each.done() for each in (*waiting, newcomer))
    there.replica = True
    there.demand.look_again()
    async with asyncio.timeout(60):
        await asyncio.gather(*waiting, newcomer)


async def test_an_admitted_request_waits_though_the_queue_is_full_and_as_long_as_its_answer_may() -> (
    None
):
    there = There(patience=0.02, max_waiting=0)
    with pytest.raises(LimitExceeded):
        await there.replica_comes()
    with pytest.raises(Unavailable, match=r"within 0\.02 s"):
        await there.demand.replica_of_admitted(MODEL, Tenant(id="open"), 0.0)
    with pytest.raises(Unavailable, match=r"within 0\.05 s"):
        await there.demand.replica_of_admitted(MODEL, Tenant(id="open"), 0.05)


async def test_a_request_that_waits_too_long_is_refused_with_retry_after() -> None:
    with pytest.raises(
        Unavailable, match=r"no replica of the model 'm' was there within 0\.02 s"
    ) as caught:
        await There(patience=0.02).replica_comes()
    assert (caught.value.code, caught.value.retry_after) == ("no_replica", 5.0)


async def test_without_a_supervisor_that_starts_replicas_no_request_waits() -> None:
    there = There(patience=0.0)
    there.text = False
    there.receive(state=CatalogueEntry.STATE_LOADING)
    await there.text_comes()
    await there.replica_comes()


async def test_what_keeps_replicas_from_starting_ends_the_wait() -> None:
    there = There()
    waiting = await begun(there.replica_comes())
    there.receive(state=CatalogueEntry.STATE_SERVING, problem="out of memory", retry_seconds=15)
    with pytest.raises(
        Unavailable, match="no replica of the model 'm' can start: out of memory"
    ) as caught:
        await waiting
    assert caught.value.retry_after == 15
    there.receive(state=CatalogueEntry.STATE_SERVING)
    again = await begun(there.replica_comes())
    there.demand.end(Unavailable("over"))
    with pytest.raises(Unavailable, match="over"):
        await again


async def test_a_request_for_a_model_that_is_being_loaded_waits_and_for_one_that_leaves_is_refused() -> (
    None
):
    there = There()
    there.text = False
    await there.text_comes()
    there.receive(state=CatalogueEntry.STATE_LOADING)
    loading = await begun(there.text_comes())
    there.receive(state=CatalogueEntry.STATE_SERVING)
    await asyncio.sleep(0)
    assert not loading.done(), "its text stages are not heard of yet"
    there.text = True
    there.demand.look_again()
    await loading
    there.receive(state=CatalogueEntry.STATE_UNLOADING)
    with pytest.raises(NotFound):
        await there.text_comes()
    there.text = False
    there.receive(state=CatalogueEntry.STATE_LOADING)
    failing = await begun(there.text_comes())
    there.receive()
    await failing


async def test_the_starter_of_replicas_is_notified_of_the_first_waiting_request_and_of_the_last_that_left(
    nats_url: str,
) -> None:
    async with (
        Bus.open(nats_url) as bus,
        bus.subscribe(subjects.EVERY_DEMAND) as words,
        asyncio.timeout(60),
    ):
        there = There(bus)
        async with there.demand.running():
            waiting = await begun(there.replica_comes())
            word = DemandWord.FromString((await anext(words)).payload)
            assert (word.gateway_id, word.model, word.num_waiting) == ("gateway-0", MODEL, 1)
            waiting.cancel()
            while DemandWord.FromString((await anext(words)).payload).num_waiting:
                pass


async def test_a_model_that_sleeps_for_longer_than_requests_wait_is_refused_with_the_estimate() -> (
    None
):
    there = There()
    there.receive(turn="asleep", wait_seconds=61.5)
    with pytest.raises(Unavailable, match="will be awake in about 62 s") as refused:
        await there.replica_comes()
    assert (refused.value.retry_after, refused.value.code) == (61.5, "asleep")
    there.receive(turn="asleep", wait_seconds=4.0)
    waiting = await begun(there.replica_comes())
    assert there.demand.wait_seconds(MODEL) == 4.0
    # An autoscaler counts it too.
    assert there.demand.waiting == {MODEL: 1}
    there.replica = True
    there.demand.look_again()
    await waiting


async def test_demand_names_the_tenants_that_wait(nats_url: str) -> None:
    async with Bus.open(nats_url) as bus, bus.subscribe(subjects.EVERY_DEMAND) as words:
        there = There(bus, max_waiting=5)
        async with there.demand.running():
            waits = [await begun(there.replica_comes(tenant)) for tenant in ("a", "a", "b")]
            async for _, word in words.decoded(DemandWord.FromString, "demand"):
                if word.num_waiting == 3:
                    break
            assert [(each.tenant, each.weight) for each in word.tenants] == [("a", 1), ("b", 1)]
            assert all(0 <= each.waited_seconds < 30 for each in word.tenants)
            there.replica = True
            there.demand.look_again()
            await asyncio.gather(*waits)
            async for _, word in words.decoded(DemandWord.FromString, "demand"):
                if not word.num_waiting:
                    break
            assert list(word.tenants) == []
