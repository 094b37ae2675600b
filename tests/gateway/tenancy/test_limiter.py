"""Limits over three gateways that share one Redis: exact, whatever comes together."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import typer

from headwater.gateway.tenancy.grant import refused
from headwater.gateway.tenancy.limiter import MAX_CALLS, NEVER, Choices, Limiter, Verdict
from headwater.gateway.tenancy.local_limits import LocalLimits
from headwater.gateway.tenancy.records import Limits, Scope
from headwater.services.cli import tenant_client
from headwater.services.cli.tenant_commands import make_commands
from headwater.services.runtime.store import Store

pytestmark = pytest.mark.usefixtures("patient_redis")


@pytest_asyncio.fixture
async def limiters(redis_url: str) -> AsyncIterator[list[Limiter]]:
    async with contextlib.AsyncExitStack() as stack:
        stores = [await stack.enter_async_context(Store.open(redis_url)) for _ in range(3)]
        # Connecting takes its time on a busy machine, and is not what is tested.
        await asyncio.gather(*(store.command("PING") for store in stores for _ in range(MAX_CALLS)))
        yield [Limiter(store) for store in stores]


async def known(limiter: Limiter, scope: Scope, spent: int = 0) -> None:
    began = await limiter.begin_rebuild("ada", scope)
    await limiter.end_rebuild("ada", scope, began=began, used=spent, seq=0)


LIMITS = [name for name in Limits.__struct_fields__ if name != "budget_period"]


@pytest.mark.parametrize("name", LIMITS)
async def test_every_limit_refuses_with_redis_and_without_it_in_its_own_words(
    limiters: list[Limiter], name: str
) -> None:
    scope = Scope("tenant", Limits(**{name: 0}))
    await known(limiters[0], scope)
    local = LocalLimits(1.0)
    if name == "requests_per_minute":
        shared = await limiters[0].count("ada", [scope])
        own = local.count("ada", [scope])
    else:
        shared = await limiters[0].reserve("ada", "r", [scope], most=1, least=1)
        own = local.reserve("ada", [scope], most=1, least=1)
    verdicts = {"limiter.py, limit_script.py": shared, "local_limits.py": own}
    for where, verdict in verdicts.items():
        assert verdict.refusal is not None, (
            f"the limit is not looked at in {where} of gateway/tenancy"
        )
        assert "tenant ada: " in str(refused(verdict.refusal, "ada"))


def test_the_command_line_sets_every_limit() -> None:
    row = (
        "add the limit to LIMITS of services/cli/tenant_client.py and its option to "
        "tenant_commands.py"
    )
    assert {*tenant_client.LIMITS} == {*Limits.__struct_fields__}, row
    commands = make_commands(Path)
    assert {*LIMITS, "budget_period"} <= options(commands, "add") & options(commands, "set"), row


def options(commands: typer.Typer, name: str) -> set[str]:
    """Names of a command's parameters."""
    group: Any = typer.main.get_command(commands)
    return {parameter.name for parameter in group.commands[name].params}


async def test_requests_of_a_minute_are_granted_as_many_times_as_the_limit_says(
    limiters: list[Limiter],
) -> None:
    scopes = [
        Scope("tenant", Limits(requests_per_minute=50)),
        Scope("key k", Limits(requests_per_minute=1000)),
    ]
    began = time.monotonic()
    verdicts = await asyncio.gather(*(limiters[i % 3].count("ada", scopes) for i in range(200)))
    seconds = time.monotonic() - began
    granted = [each for each in verdicts if each.refusal is None]
    assert len(granted) == 50
    refusals = {(each.refusal.scope, each.refusal.limit) for each in verdicts if each.refusal}
    assert refusals == {("tenant", "requests")}
    assert all(60 - seconds <= each.refusal.seconds <= 65 for each in verdicts if each.refusal)
    assert sorted(each.requests.remaining for each in granted if each.requests) == list(range(50))
    assert (await limiters[0].count("bob", scopes)).refusal is None


async def test_tokens_of_a_minute_count_what_was_used_and_come_back_when_they_were_not(
    limiters: list[Limiter],
) -> None:
    scopes = [Scope("tenant", Limits(tokens_per_minute=1000))]
    used = 0

    async def request(i: int) -> int:
        limiter = limiters[i % 3]
        verdict = await limiter.reserve("ada", f"r{i}", scopes, most=90, least=90)
        if not verdict.granted:
            return 0
        nonlocal used
        used += 90
        assert used <= 1000
        await asyncio.sleep(0)
        used -= 80
        await limiter.settle("ada", f"r{i}", scopes, used=10, seq=0)
        return 10

    while any(await asyncio.gather(*(request(i) for i in range(30)))):
        pass
    assert used == 920, "until what another one has to reserve does not fit"
    verdict = await limiters[0].reserve("ada", "last", scopes, most=2000, least=1001)
    assert verdict.refusal is not None
    assert verdict.refusal.seconds == -1, "what exceeds the limit by itself fits never"


async def test_a_budget_is_used_to_its_last_token_and_not_beyond(limiters: list[Limiter]) -> None:
    scopes = [
        Scope("tenant", Limits(budget=1000)),
        Scope("model m", Limits(budget=10_000, budget_period="day")),
    ]
    first = await limiters[0].reserve("ada", "r", scopes, most=10, least=1)
    assert first.refusal is not None
    assert first.refusal.limit == "unknown", "nobody has counted yet"
    for scope in scopes:
        await known(limiters[0], scope)
    spent = 0

    async def request(i: int) -> None:
        nonlocal spent
        limiter = limiters[i % 3]
        id = f"r{i}"
        verdict = await limiter.reserve("ada", id, scopes, most=64, least=20)
        held = verdict.granted
        while held and held < 200:
            more = await limiter.extend("ada", id, scopes, more=32, held=held, used=held)
            if not more.granted:
                break
            held += more.granted
        if held:
            await limiter.settle("ada", id, scopes, used=held, seq=0)
            spent += held

    await asyncio.gather(*(request(i) for i in range(40)))
    assert spent == 1000


async def test_no_more_run_at_once_than_the_limit_says_over_all_gateways(
    limiters: list[Limiter],
) -> None:
    scopes = [Scope("tenant", Limits(concurrency=4))]
    running = 0
    most = 0

    async def request(i: int) -> None:
        nonlocal running, most
        limiter = limiters[i % 3]
        while not (await limiter.reserve("ada", f"r{i}", scopes, most=1, least=1)).granted:  # noqa: ASYNC110 (a client that tries again)
            await asyncio.sleep(0.005)
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.002)
        running -= 1
        await limiter.settle("ada", f"r{i}", scopes, used=1, seq=0)

    await asyncio.gather(*(request(i) for i in range(40)))
    assert most == 4


async def test_choices_are_what_runs_at_once_and_a_request_gets_as_many_as_are_left(
    limiters: list[Limiter],
) -> None:
    scopes = [Scope("tenant", Limits(concurrency=10)), Scope("key k", Limits(concurrency=7))]
    wants = Choices(most=1024, least=1)

    async def ask(name: str, choices: Choices = wants) -> Verdict:
        return await limiters[0].reserve("ada", name, scopes, most=1, least=1, choices=choices)

    assert (await ask("many")).num_choices == 7
    full = (await ask("next")).refusal
    assert full is not None
    assert (full.scope, full.limit, full.seconds) == ("key k", "concurrency", 1.0)
    # Renewed by its gateway, and renewed after its Redis was lost, it holds what it held.
    await limiters[1].extend("ada", "many", scopes, more=0, held=1, used=0, num_choices=7)
    assert (await ask("next")).refusal is not None
    await limiters[1].settle("ada", "many", scopes, used=1, seq=0)
    assert (await ask("beams", Choices(4, 4))).num_choices == 4
    too_few = (await ask("more beams", Choices(4, 4))).refusal
    assert too_few is not None
    assert too_few.seconds == 1.0
    never = (await ask("too many beams", Choices(11, 11))).refusal
    assert never is not None
    assert never.seconds == NEVER, "no waiting makes room for more than there is"
    assert (await ask("rest")).num_choices == 3


async def test_an_emptied_redis_learns_how_many_choices_run(
    limiters: list[Limiter], redis_url: str
) -> None:
    scopes = [Scope("tenant", Limits(concurrency=10))]
    asked = await limiters[0].reserve("ada", "many", scopes, most=1, least=1, choices=Choices(8, 1))
    async with Store.open(redis_url) as store:
        await store.command("FLUSHALL")
    await limiters[0].extend(
        "ada", "many", scopes, more=0, held=1, used=0, num_choices=asked.num_choices
    )
    assert (
        await limiters[1].reserve("ada", "b", scopes, most=1, least=1, choices=Choices(8, 1))
    ).num_choices == 2


async def test_counting_a_request_takes_one_of_the_minute_and_no_more(
    limiters: list[Limiter],
) -> None:
    scopes = [
        Scope("tenant", Limits(requests_per_minute=3, concurrency=0, budget=0, tokens_per_minute=0))
    ]
    verdicts = [await limiters[i % 3].count("ada", scopes) for i in range(4)]
    assert [each.refusal.limit if each.refusal else "" for each in verdicts] == [
        "",
        "",
        "",
        "requests",
    ]
    assert [each.requests.remaining for each in verdicts if each.requests] == [2, 1, 0, 0]


async def test_what_a_gateway_abandons_is_given_back_but_for_what_it_used(
    limiters: list[Limiter], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headwater.gateway.tenancy.limiter.LEASE_MS", 50)
    scope = Scope("tenant", Limits(concurrency=1, budget=100, tokens_per_minute=100))
    await known(limiters[0], scope)
    assert (await limiters[0].reserve("ada", "dead", [scope], most=100, least=1)).granted == 100
    await limiters[0].extend("ada", "dead", [scope], more=0, held=100, used=30)
    await asyncio.sleep(0.08)
    assert (await limiters[1].reserve("ada", "next", [scope], most=100, least=70)).refusal is None
    # The first was only slow: it takes up where it was, and the limit knows.
    await limiters[0].settle("ada", "dead", [scope], used=40, seq=0)
    await limiters[1].settle("ada", "next", [scope], used=0, seq=0)
    assert (await limiters[2].reserve("ada", "third", [scope], most=100, least=1)).granted == 60


async def test_a_renewal_that_comes_behind_the_end_brings_nothing_back(
    limiters: list[Limiter],
) -> None:
    scope = Scope("tenant", Limits(concurrency=1, budget=100, tokens_per_minute=100))
    await known(limiters[0], scope)
    assert (await limiters[0].reserve("ada", "r", [scope], most=60, least=1)).granted == 60
    await limiters[0].settle("ada", "r", [scope], used=20, seq=0)
    await limiters[0].extend("ada", "r", [scope], more=10, held=60, used=20)
    await limiters[0].settle("ada", "r", [scope], used=20, seq=0)
    assert (await limiters[1].reserve("ada", "next", [scope], most=100, least=80)).granted == 80


async def test_an_emptied_redis_learns_of_what_runs_and_what_was_spent(
    limiters: list[Limiter], redis_url: str
) -> None:
    scope = Scope("tenant", Limits(concurrency=2, budget=1000))
    await known(limiters[0], scope)
    await limiters[0].reserve("ada", "old", [scope], most=100, least=1)
    async with Store.open(redis_url) as store:
        await store.command("FLUSHALL")
    renewed = await limiters[0].extend("ada", "old", [scope], more=0, held=100, used=7)
    assert renewed.refusal is None
    began = await limiters[1].begin_rebuild("ada", scope)
    # Settled while the records are read: number 7 is among them, number 9 is not.
    await limiters[2].settle("ada", "gone-1", [scope], used=11, seq=7)
    await limiters[2].settle("ada", "gone-2", [scope], used=13, seq=9)
    await limiters[1].end_rebuild("ada", scope, began=began, used=500, seq=8)
    verdict = await limiters[1].reserve("ada", "new", [scope], most=1000, least=1)
    assert verdict.granted == 1000 - 500 - 13 - 100
    third = await limiters[1].reserve("ada", "third", [scope], most=1, least=1)
    assert third.refusal is not None
    await limiters[0].settle("ada", "old", [scope], used=20, seq=10)
    verdict = await limiters[1].reserve("ada", "fourth", [scope], most=1000, least=1)
    assert verdict.granted == 80


async def test_unused_counters_leave_redis(
    limiters: list[Limiter], redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rotated = [Scope("tenant", Limits(concurrency=4)), Scope("key old", Limits(concurrency=4))]
    await limiters[0].reserve("ada", "r0", rotated, most=1, least=1)
    await limiters[0].settle("ada", "r0", rotated, used=1, seq=0)
    async with Store.open(redis_url) as store:
        keys = await store.command("KEYS", "*")
        assert {await store.command("PTTL", key) > 0 for key in keys} == {True}
        monkeypatch.setattr("headwater.gateway.tenancy.limiter.KEEP_MS", 1000)
        await asyncio.sleep(1.01)
        left: list[bytes] = []
        # All scopes expire if the machine pauses for a second; the requests are then sent again.
        while not left:
            for i in range(20):
                await limiters[1].reserve("ada", f"n{i}", rotated[:1], most=1, least=1)
            left = await store.command("HKEYS", "limits:{tenant:ada}")
        assert left == [b"tenant"]
        await asyncio.sleep(1.05)
        assert await store.command("KEYS", "*{tenant:ada}") == []


async def test_what_a_dead_gateway_reserved_lapses_at_what_was_used_and_may_go_on_from_there(
    limiters: list[Limiter],
) -> None:
    scopes = [Scope("tenant", Limits(budget=1000, tokens_per_minute=1000, concurrency=2))]
    await known(limiters[0], scopes[0])
    for name in ("a", "b"):
        assert (
            await limiters[0].reserve("ada", name, scopes, most=400, least=1, used=10)
        ).granted == 400
    assert (await limiters[1].reserve("ada", "c", scopes, most=1, least=1)).refusal is not None
    for limiter in limiters:
        # Each gateway that is there hears of it.
        await limiter.lapse("ada", "a", used=150, seq=1)
    await limiters[0].lapse("ada", "never reserved", used=150, seq=2)
    verdict = await limiters[1].reserve("ada", "c", scopes, most=1000, least=1)
    assert verdict.granted == 1000 - 400 - 150
    await limiters[1].settle("ada", "c", scopes, used=0, seq=0)
    # It lived after all, and went on.
    assert (await limiters[0].extend("ada", "a", scopes, more=50, held=400, used=200)).granted == 50
    await limiters[0].settle("ada", "a", scopes, used=220, seq=1)
    await limiters[0].lapse("ada", "b", used=80, seq=3)
    assert (
        await limiters[1].reserve("ada", "d", scopes, most=1000, least=1)
    ).granted == 1000 - 220 - 80
