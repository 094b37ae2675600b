"""Fair shares: who was given less goes first, whichever gateway gave."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from headwater.gateway.tenancy.tenants import Tenant
from headwater.gateway.tenancy.virtual_time import MAX_TENANTS, SHARE_SECONDS, VirtualTime
from headwater.services.runtime.store import Store, StoreUnavailable
from headwater.services.stack.embedded import start_valkey

pytestmark = pytest.mark.usefixtures("patient_redis")

ADA = Tenant(id="ada")
BOB = Tenant(id="bob")
HEAVY = Tenant(id="heavy", weight=4.0)


@pytest_asyncio.fixture
async def clocks(redis_url: str) -> AsyncIterator[list[VirtualTime]]:
    async with contextlib.AsyncExitStack() as stack:
        stores = [await stack.enter_async_context(Store.open(redis_url)) for _ in range(3)]
        for store in stores:
            await store.command("PING")
        yield [VirtualTime(store) for store in stores]


def begin(
    stack: contextlib.ExitStack, clock: VirtualTime, tenant: Tenant, num_tokens: int = 100
) -> float:
    return stack.enter_context(clock.request(tenant, num_tokens, 0)).virtual_time


def test_many_at_once_stand_in_line_and_a_heavy_tenant_advances_slower(redis_url: str) -> None:
    clock = VirtualTime(Store(None))
    with contextlib.ExitStack() as stack:
        assert [begin(stack, clock, ADA) for _ in range(3)] == [0.0, 100.0, 200.0]
        assert [begin(stack, clock, HEAVY) for _ in range(3)] == [0.0, 25.0, 50.0]


def test_predicted_costs_are_corrected_at_the_end() -> None:
    clock = VirtualTime(Store(None))
    with contextlib.ExitStack() as stack:
        begin(stack, clock, BOB, 1)
        with clock.request(ADA, 100, 1000) as share:
            pass
        share.ended(uncached=20, cached=80, output=10)
        assert begin(stack, clock, ADA) == 20 + 8 + 20


def test_the_length_of_answers_is_learned_from_answers_alone() -> None:
    clock = VirtualTime(Store(None))

    def ended(max_tokens: int, uncached: int, output: int) -> None:
        with clock.request(ADA, 100, max_tokens) as share:
            share.ended(uncached=uncached, cached=0, output=output)

    ended(1000, 100, 50)
    for _ in range(10):
        # Prompts that are embedded or refused by a full queue have no answers.
        ended(0, 100, 0)
        ended(1000, 0, 0)
    with contextlib.ExitStack() as stack:
        before = begin(stack, clock, ADA, 0)
        stack.enter_context(clock.request(ADA, 100, 1000))
        assert begin(stack, clock, ADA) - before == 100 + 2 * 50


async def test_usage_at_one_gateway_counts_on_the_others(clocks: list[VirtualTime]) -> None:
    with contextlib.ExitStack() as stack:
        begin(stack, clocks[0], ADA, 500)
        begin(stack, clocks[1], ADA, 300)
        begin(stack, clocks[2], BOB, 10)
        for clock in (*clocks, *clocks):
            await clock.share()
        assert {begin(stack, clock, ADA) for clock in clocks} == {800.0}
        assert {begin(stack, clock, BOB) for clock in clocks} == {10.0}


async def test_times_are_shared_again_once_redis_lets_them(free_dir: Path) -> None:
    server = await start_valkey(free_dir)
    try:
        async with Store.open(server.url) as store, VirtualTime(store).running() as one:
            other = VirtualTime(store)
            await store.command("ACL", "SETUSER", "default", "-@scripting")
            with contextlib.ExitStack() as stack:
                begin(stack, one, ADA, 500)
                begin(stack, other, ADA, 300)
                await asyncio.sleep(5 * SHARE_SECONDS)
                await store.command("ACL", "SETUSER", "default", "+@scripting")
                async with asyncio.timeout(60):
                    while other._times[ADA.key] < 800.0:
                        await other.share()
                        await asyncio.sleep(SHARE_SECONDS)
    finally:
        await server.stop()


async def test_a_tenant_that_was_away_begins_at_the_virtual_time_of_the_others(
    clocks: list[VirtualTime],
) -> None:
    with contextlib.ExitStack() as stack:
        shares = [stack.enter_context(clocks[0].request(ADA, 100, 0)) for _ in range(5)]
        for share in shares[:3]:
            share.started()
        for _ in range(2):
            for clock in clocks:
                await clock.share()
                begin(stack, clock, HEAVY, 0)
        assert {begin(stack, clock, BOB, 0) for clock in clocks} == {200.0}, (
            "not behind the two that wait"
        )
        assert begin(stack, clocks[0], ADA) == 500.0


async def test_without_redis_a_gateway_is_fair_by_itself_and_shares_its_times_later(
    redis_url: str,
) -> None:
    clock = VirtualTime(Store(None))
    with contextlib.ExitStack() as stack:
        begin(stack, clock, ADA)
        with pytest.raises(StoreUnavailable):
            await clock.share()
        assert begin(stack, clock, ADA) == 100.0
        async with Store.open(redis_url) as store:
            clock._store = store
            await clock.share()
            assert float(await store.command("HGET", "fair:{tenants}", "ada")) == 200.0
            await store.command("FLUSHALL")
            await clock.share()
            assert float(await store.command("HGET", "fair:{tenants}", "ada")) == 200.0


async def test_tenants_that_name_themselves_are_forgotten_without_redis_too() -> None:
    clock = VirtualTime(Store(None))
    for number in range(MAX_TENANTS + 2):
        with clock.request(Tenant(id=f"t{number}"), 1, 1) as share:
            share.ended(uncached=1, cached=0, output=1)
    with contextlib.ExitStack() as stack:
        begin(stack, clock, ADA)
        with pytest.raises(StoreUnavailable):
            await clock.share()
        assert begin(stack, clock, ADA) == 100.0
    assert len(clock._times) + len(clock._unsent) + len(clock._answer_lens) <= 3


def test_service_in_one_queue_does_not_count_in_another() -> None:
    """A model that has room for all serves far more than one at which requests wait."""
    clock = VirtualTime(Store(None))
    with contextlib.ExitStack() as stack:
        waiting = [stack.enter_context(clock.request(ADA, 100, 0, queue="slow")) for _ in range(5)]
        for _ in range(50):
            with clock.request(HEAVY, 4000, 0, queue="fast") as share:
                share.started()
        waiting[0].started()
        waiting[1].started()
        returning = stack.enter_context(clock.request(BOB, 100, 0, queue="slow"))
        assert returning.virtual_time == 100.0, "before the third that waits"
        with clock.request(Tenant(id="late"), 100, 0, queue="fast") as late:
            assert late.virtual_time == 49_000.0


def test_virtual_time_of_a_waiting_tenant_is_not_raised() -> None:
    clock = VirtualTime(Store(None))
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(clock.request(BOB, 10, 0))
        for _ in range(5):
            with clock.request(ADA, 100, 0) as share:
                share.started()
        assert begin(stack, clock, BOB, 10) == 10.0
        first.release()


async def test_gateways_share_the_virtual_time_of_each_queue(clocks: list[VirtualTime]) -> None:
    with contextlib.ExitStack() as stack:
        for share in [
            stack.enter_context(clocks[0].request(ADA, 100, 0, queue="slow")) for _ in range(3)
        ]:
            share.started()
        begin(stack, clocks[1], HEAVY, 0)
        stack.enter_context(clocks[1].request(HEAVY, 0, 0, queue="slow"))
        for _ in range(2):
            for clock in clocks[:2]:
                await clock.share()
        assert stack.enter_context(clocks[1].request(BOB, 0, 0, queue="slow")).virtual_time == 200.0
        assert (
            stack.enter_context(clocks[1].request(Tenant(id="cy"), 0, 0, queue="fast")).virtual_time
            == 0.0
        )
