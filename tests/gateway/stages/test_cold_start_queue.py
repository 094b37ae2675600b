"""Requests that wait for a replica: how long, how many, and what ends the wait."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from headwater.gateway.stages.catalogues import Catalogues
from headwater.gateway.stages.cold_start_queue import ColdStartQueue
from headwater.proto.events_pb2 import Catalogue, CatalogueEntry
from headwater.proto.events_pb2 import Demand as DemandWord
from headwater.services.runtime import subjects
from headwater.services.runtime.bus import Bus
from headwater.services.runtime.errors import LimitExceeded, NotFound, Unavailable

MODEL = "m"


class There:
    """What is there of a model."""

    def __init__(self, bus: Bus | None = None, **given: Any) -> None:
        self.text, self.replica = True, False
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

    def hear(self, **entry: Any) -> None:
        models = [CatalogueEntry(model=MODEL, **entry)] if entry else []
        self.catalogues.on_catalogue(Catalogue(supervisor_id="s", models=models))


async def begun(work: Any) -> asyncio.Task[None]:
    task: asyncio.Task[None] = asyncio.create_task(work)
    await asyncio.sleep(0)
    return task


async def test_a_request_waits_until_a_replica_is_there_and_no_more_than_allowed_wait() -> None:
    there = There()
    first, second = await begun(there.demand.replica(MODEL)), await begun(there.demand.replica(MODEL))
    assert there.demand.waiting == {MODEL: 2}
    with pytest.raises(LimitExceeded, match="2 requests are already waiting"):
        await there.demand.replica(MODEL)
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)
    assert there.demand.waiting == {MODEL: 1}
    there.demand.look_again()
    await asyncio.sleep(0)
    assert not first.done()
    there.replica = True
    there.demand.look_again()
    await first
    await there.demand.replica(MODEL)


async def test_an_admitted_request_waits_though_the_queue_is_full_and_as_long_as_its_answer_may() -> None:
    there = There(patience=0.02, max_waiting=0)
    with pytest.raises(LimitExceeded):
        await there.demand.replica(MODEL)
    with pytest.raises(Unavailable, match=r"within 0\.02 s"):
        await there.demand.replica(MODEL, 0.0)
    with pytest.raises(Unavailable, match=r"within 0\.05 s"):
        await there.demand.replica(MODEL, 0.05)


async def test_who_waits_too_long_is_told_to_come_again() -> None:
    with pytest.raises(Unavailable, match=r"no replica of the model 'm' was there within 0\.02 s") as caught:
        await There(patience=0.02).demand.replica(MODEL)
    assert (caught.value.code, caught.value.retry_after) == ("no_replica", 5.0)


async def test_where_nobody_starts_replicas_nobody_waits() -> None:
    there = There(patience=0.0)
    there.text = False
    there.hear(state=CatalogueEntry.STATE_LOADING)
    await there.demand.text_stages(MODEL)
    await there.demand.replica(MODEL)


async def test_what_keeps_replicas_from_starting_ends_the_wait() -> None:
    there = There()
    waiting = await begun(there.demand.replica(MODEL))
    there.hear(state=CatalogueEntry.STATE_SERVING, problem="out of memory", retry_seconds=15)
    with pytest.raises(Unavailable, match="no replica of the model 'm' can start: out of memory") as caught:
        await waiting
    assert caught.value.retry_after == 15
    there.hear(state=CatalogueEntry.STATE_SERVING)
    again = await begun(there.demand.replica(MODEL))
    there.demand.end(Unavailable("over"))
    with pytest.raises(Unavailable, match="over"):
        await again


async def test_a_request_for_a_model_that_is_being_loaded_waits_and_for_one_that_leaves_is_refused() -> None:
    there = There()
    there.text = False
    await there.demand.text_stages(MODEL)
    there.hear(state=CatalogueEntry.STATE_LOADING)
    loading = await begun(there.demand.text_stages(MODEL))
    there.hear(state=CatalogueEntry.STATE_SERVING)
    await asyncio.sleep(0)
    assert not loading.done(), "its text stages are not heard of yet"
    there.text = True
    there.demand.look_again()
    await loading
    there.hear(state=CatalogueEntry.STATE_UNLOADING)
    with pytest.raises(NotFound):
        await there.demand.text_stages(MODEL)
    there.text = False
    there.hear(state=CatalogueEntry.STATE_LOADING)
    failing = await begun(there.demand.text_stages(MODEL))
    there.hear()
    await failing


async def test_whoever_starts_replicas_hears_of_the_first_who_waits_and_of_the_last_who_left(nats_url: str) -> None:
    async with Bus.open(nats_url) as bus, bus.subscribe(subjects.EVERY_DEMAND) as words, asyncio.timeout(60):
        there = There(bus)
        async with there.demand.running():
            waiting = await begun(there.demand.replica(MODEL))
            word = DemandWord.FromString((await anext(words)).payload)
            assert (word.gateway_id, word.model, word.num_waiting) == ("gateway-0", MODEL, 1)
            waiting.cancel()
            while DemandWord.FromString((await anext(words)).payload).num_waiting:
                pass
