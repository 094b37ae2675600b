"""Budgets that gateways count anew at the same time, in any order, some of them dying: nothing
spent is lost."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence

import msgspec
import pytest

from headwater.gateway.tenancy.limiter import Limiter
from headwater.gateway.tenancy.records import Limits, Scope
from headwater.services.runtime.store import Store
from tests.long_values import long_but

pytestmark = pytest.mark.usefixtures("patient_redis")

SCOPE = Scope("tenant", Limits(budget=2000))
RECORDED = 500
"""Number of tokens of the records up to number 4."""
READS = ("begin", "read", "end")


class Rebuilder:
    """A gateway that counts what a tenant has spent, a step at a time."""

    def __init__(self, limiter: Limiter, tenant: str, records: list[int]) -> None:
        self._limiter = limiter
        self._tenant = tenant
        self._records = records
        self._began = self._used = self._last = 0

    async def step(self, name: str) -> None:
        if name == "begin":
            self._began = await self._limiter.begin_rebuild(self._tenant, SCOPE)
        elif name == "read":
            self._used, self._last = RECORDED + sum(self._records), 4 + len(self._records)
        else:
            await self._limiter.end_rebuild(
                self._tenant, SCOPE, began=self._began, used=self._used, seq=self._last
            )


def interleaved(*lists: Sequence[str]) -> Iterator[list[str]]:
    """All orders of the items that keep the order of each list."""
    if not any(lists):
        yield []
    for i, each in enumerate(lists):
        if each:
            for rest in interleaved(*lists[:i], each[1:], *lists[i + 1 :]):
                yield [each[0], *rest]


def schedules(num_ended: int) -> list[list[str]]:
    """Orders of two rebuilders, of which the first may die after each of its steps, and of a
    request that ends."""
    first = [f"a {name}" for name in READS[:num_ended]]
    second = [f"b {name}" for name in READS]
    return list(interleaved(first, second, ["request stored", "request settled"]))


@pytest.mark.parametrize(
    "is_open", long_but([False, True], False), ids=["lost by Redis", "open in Redis"]
)
async def test_two_gateways_that_count_at_once_lose_no_token_in_any_order(
    redis_url: str, is_open: bool
) -> None:
    """The second gateway counts to its end, the first dies at the latest after any step."""
    async with Store.open(redis_url) as store:
        limiter = Limiter(store)

        async def run(tenant: str, steps: list[str]) -> int:
            records: list[int] = []
            rebuilders = {name: Rebuilder(limiter, tenant, records) for name in "ab"}
            if is_open:
                await limiter.extend(tenant, "request", [SCOPE], more=0, held=100, used=7)
            for who, what in (step.split() for step in steps):
                if what == "stored":
                    records.append(70)
                elif what == "settled":
                    await limiter.settle(tenant, "request", [SCOPE], used=70, seq=5)
                else:
                    await rebuilders[who].step(what)
            return (await limiter.reserve(tenant, "last", [SCOPE], most=9999, least=1)).granted

        for i, steps in enumerate(
            steps for num_ended in range(4) for steps in schedules(num_ended)
        ):
            assert await run(f"t{i}", steps) == 2000 - RECORDED - 70, steps


async def test_a_count_that_began_when_the_budget_was_known_changes_nothing(redis_url: str) -> None:
    """The second gateway begins late and dies."""
    async with Store.open(redis_url) as store:
        limiter = Limiter(store)
        began = await limiter.begin_rebuild("ada", SCOPE)
        await limiter.end_rebuild("ada", SCOPE, began=began, used=500, seq=4)
        await limiter.begin_rebuild("ada", SCOPE)
        assert (await limiter.reserve("ada", "r", [SCOPE], most=1000, least=1)).granted == 1000
        await limiter.settle("ada", "r", [SCOPE], used=70, seq=5)
        assert (
            await limiter.reserve("ada", "last", [SCOPE], most=9999, least=1)
        ).granted == 2000 - 500 - 70


async def test_a_count_from_before_redis_was_emptied_is_not_used(redis_url: str) -> None:
    """What was settled between its beginning and that of the next count is in neither."""
    async with Store.open(redis_url) as store:
        limiter = Limiter(store)
        early = await limiter.begin_rebuild("ada", SCOPE)
        await limiter.settle("ada", "gone", [SCOPE], used=70, seq=5)
        await store.command("FLUSHALL")
        await asyncio.sleep(0.002)
        late = await limiter.begin_rebuild("ada", SCOPE)
        await limiter.end_rebuild("ada", SCOPE, began=early, used=500, seq=4)
        refusal = (await limiter.reserve("ada", "r", [SCOPE], most=1, least=1)).refusal
        assert refusal is not None
        assert refusal.limit == "unknown"
        await limiter.end_rebuild("ada", SCOPE, began=late, used=570, seq=5)
        assert (
            await limiter.reserve("ada", "r", [SCOPE], most=9999, least=1)
        ).granted == 2000 - 570


async def test_a_count_that_was_begun_yesterday_and_ended_today_is_not_used(redis_url: str) -> None:
    scope = Scope("tenant", Limits(budget=2000, budget_period="day"))
    yesterday = int(time.time()) // 86_400 * 86_400_000 - 1
    async with Store.open(redis_url) as store:
        limiter = Limiter(store)
        rebuild = {"since": yesterday, "latest": yesterday, "late": []}
        counter = {
            "running": 0,
            "slots": {},
            "kind": "day",
            "period": yesterday // 86_400_000,
            "rebuilding": rebuild,
        }
        await store.command(
            "HSET", "limits:{tenant:ada}", "tenant", msgspec.msgpack.encode(counter)
        )
        await limiter.end_rebuild("ada", scope, began=yesterday, used=1990, seq=4)
        refusal = (await limiter.reserve("ada", "r", [scope], most=1, least=1)).refusal
        assert refusal is not None
        assert refusal.limit == "unknown"
        began = await limiter.begin_rebuild("ada", scope)
        await limiter.end_rebuild("ada", scope, began=began, used=500, seq=4)
        verdicts = [
            await limiter.reserve("ada", name, [scope], most=1400, least=1)
            for name in ("r", "last")
        ]
        assert [each.granted for each in verdicts] == [1400, 100], "the 500 tokens are today's"


async def test_what_dead_gateways_began_to_count_keeps_no_settlement(redis_url: str) -> None:
    long_ago = int(time.time() * 1000) - 11_000
    async with Store.open(redis_url) as store:
        limiter = Limiter(store)
        rebuild = {"since": long_ago, "latest": long_ago, "late": [[long_ago, 3, 70]] * 9}
        counter = {"running": 0, "slots": {}, "kind": "month", "period": 1, "rebuilding": rebuild}
        await store.command(
            "HSET", "limits:{tenant:ada}", "tenant", msgspec.msgpack.encode(counter)
        )
        await limiter.settle("ada", "gone", [SCOPE], used=70, seq=5)
        packed = await store.command("HGET", "limits:{tenant:ada}", "tenant")
        assert "rebuilding" not in msgspec.msgpack.decode(packed)
