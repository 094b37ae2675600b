"""Limits over three running gateways: never more than they say, and to the last token what they
say."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import json
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from headwater.gateway.tenancy.limiter import LEASE_MS
from headwater.services.runtime.bus import Bus
from headwater.services.runtime.store import Store
from headwater.services.runtime.usage_log import UsageLog, UsageRecord
from tests.gateway.processes import (
    UNDRAFTED,
    Behind,
    Gateway,
    completion_body,
    engine_stage,
    gateway_stage,
    started,
)

ADMIN = "admin-key-of-the-house"
COMPLETIONS = "/v1/completions"
SCALES = [1, pytest.param(8, marks=pytest.mark.long)]
LONG = 8000
"""Tokens of an answer that outlasts its test."""


@contextlib.contextmanager
def flags_before(behind: Behind, servers: list[str], step_seconds: float) -> Iterator[list[str]]:
    """Flags of gateways that grant nothing without Redis and have an engine of their own."""
    engine = engine_stage(f"--simulated-step-seconds={step_seconds}")
    with started(engine):
        seeds = Behind(behind.processor, behind.output_processor, (engine.address,)).flags()
        yield [*seeds, *servers, f"--admin-key={ADMIN}", "--fail-open-share=0"]


@pytest.fixture(scope="module")
def servers(nats_url: str, shared_redis_url: str) -> list[str]:
    return [f"--nats-url={nats_url}", f"--redis-url={shared_redis_url}"]


@pytest.fixture(scope="module")
def flags(behind: Behind, servers: list[str]) -> Iterator[list[str]]:
    """Flags of gateways whose answers take 2 ms a token."""
    with flags_before(behind, servers, 0.002) as found:
        yield found


@pytest.fixture(scope="module")
def slow_flags(behind: Behind, servers: list[str]) -> Iterator[list[str]]:
    """Flags of gateways whose answers take 0.1 s a token. Some hundred tokens outlast a test, even
    if it pauses."""
    with flags_before(behind, servers, 0.1) as found:
        yield found


@contextlib.contextmanager
def gateways_of(flags: list[str], count: int) -> Iterator[list[Gateway]]:
    stages = [gateway_stage(*flags) for _ in range(count)]
    with started(*stages), contextlib.ExitStack() as clients:
        found = [clients.enter_context(Gateway(stage)) for stage in stages]
        for gateway in found:
            gateway.wait_until(gateway.is_ready)
        yield found


@pytest.fixture(scope="module")
def gateways(flags: list[str]) -> Iterator[list[Gateway]]:
    with gateways_of(flags, 3) as found:
        yield found


@pytest.fixture(scope="module")
def slow(slow_flags: list[str]) -> Iterator[Gateway]:
    with gateways_of(slow_flags, 1) as [found]:
        yield found


class Customer:
    """A tenant that all gateways know."""

    def __init__(self, gateways: list[Gateway], **limits: Any) -> None:
        self.gateways = gateways
        self.id = f"t-{uuid.uuid4().hex[:8]}"
        body = {"id": self.id, "limits": limits}
        made = gateways[0].client.post(
            "/admin/tenants", json=body, headers={"authorization": f"Bearer {ADMIN}"}
        )
        assert made.status_code == 201, made.text
        self.uid = made.json()["uid"]
        self.headers = {"authorization": f"Bearer {made.json()['key']}"}
        for gateway in gateways:
            self._wait_known(gateway)

    def _wait_known(self, gateway: Gateway) -> None:
        gateway.wait_until(
            lambda: gateway.client.get("/v1/models", headers=self.headers).status_code == 200
        )

    def ask(self, number: int, prompt_len: int, max_tokens: int) -> int:
        """Of the gateway whose turn it is: tokens that were used, 0 where a limit stood in the
        way."""
        body = completion_body([7] * prompt_len, max_tokens=max_tokens, ignore_eos=True)
        reply = self.gateways[number % len(self.gateways)].client.post(
            COMPLETIONS, json=body, headers=self.headers
        )
        assert reply.status_code in (200, 429), reply.text
        return int(reply.json()["usage"]["total_tokens"]) if reply.status_code == 200 else 0

    @contextlib.contextmanager
    def streaming(self, number: int, prompt_len: int, max_tokens: int) -> Iterator[Iterator[str]]:
        """An answer that has begun, as lines."""
        body = completion_body(
            [7] * prompt_len, max_tokens=max_tokens, ignore_eos=True, stream=True, **UNDRAFTED
        )
        client = self.gateways[number % len(self.gateways)].client
        with client.stream(
            "POST", COMPLETIONS, json=body | {"return_token_ids": True}, headers=self.headers
        ) as reply:
            assert reply.status_code in (200, 429), reply.read()
            yield reply.iter_lines() if reply.status_code == 200 else iter(())

    @contextlib.contextmanager
    def holding(self, numbers: range, prompt_len: int, max_tokens: int) -> Iterator[None]:
        """As many answers that have begun."""
        with contextlib.ExitStack() as stack:
            # An iterator that nobody has ends its stream.
            begun = [
                stack.enter_context(self.streaming(i, prompt_len, max_tokens)) for i in numbers
            ]
            assert all(next(lines, "") for lines in begun)
            yield

    def stream(self, number: int, prompt_len: int, max_tokens: int) -> int:
        """Tokens of a prompt and of its answer, until a limit ends it."""
        with self.streaming(number, prompt_len, max_tokens) as lines:
            events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        tokens = sum(
            len(each.get("token_ids", ())) for event in events for each in event.get("choices", ())
        )
        return prompt_len + tokens if events else 0

    def usage(self, nats_url: str) -> list[UsageRecord]:
        async def read() -> list[UsageRecord]:
            async with Bus.open(nats_url) as bus:
                since = datetime.datetime.now(datetime.UTC) - datetime.timedelta(hours=1)
                return [record async for _, record in UsageLog(bus).read(self.uid, since)]

        return asyncio.run(read())


def at_once(ask: Callable[[int], int], count: int) -> list[int]:
    with ThreadPoolExecutor(min(count, 48)) as pool:
        return list(pool.map(ask, range(count)))


@pytest.mark.long
@pytest.mark.parametrize("scale", SCALES)
def test_as_many_requests_and_tokens_a_minute_are_used_as_there_are(
    gateways: list[Gateway], scale: int
) -> None:
    by_request = Customer(gateways, requests_per_minute=15 * scale)
    used = at_once(lambda i: by_request.ask(i, 4, 2), 45 * scale)
    assert sorted(used) == [0] * 30 * scale + [6] * 15 * scale
    by_token = Customer(gateways, tokens_per_minute=600 * scale)
    assert sum(at_once(lambda i: by_token.ask(i, 10, 40), 36 * scale)) == 600 * scale


@pytest.mark.long
def test_tokens_that_an_answer_did_not_use_are_another_s_to_the_last(
    slow: Gateway, gateways: list[Gateway], nats_url: str
) -> None:
    ada = Customer([slow, *gateways[1:]], tokens_per_minute=1000)
    with ada.streaming(0, 10, 990) as lines:
        next(lines)
        assert not any(ada.ask(i, 1, 1) for i in (1, 2)), "all of them are held"
    gateways[0].wait_until(lambda: bool(ada.usage(nats_url)))
    [record] = ada.usage(nats_url)
    left = 1000 - record.num_tokens
    assert left > 0
    gateways[0].wait_until(lambda: ada.ask(1, 1, 1) == 2)
    assert ada.ask(2, left - 2, 1) == 0, "a token more than there is"
    assert ada.ask(2, left - 3, 1) == left - 2
    assert ada.ask(1, 1, 1) == 0


@pytest.mark.parametrize("scale", SCALES)
def test_no_more_run_at_once_than_may_and_as_many_as_may_do(
    gateways: list[Gateway], nats_url: str, scale: int
) -> None:
    ada = Customer(gateways, concurrency=3)
    with ada.holding(range(3), 4, LONG):
        assert not any(ada.ask(i, 4, 1) for i in range(3))

    def ask_until_answered(i: int) -> int:
        gateways[0].wait_until(lambda: ada.ask(i, 4, 10) > 0, 60.0 * scale)
        return 1

    count = 12 * scale
    assert sum(at_once(ask_until_answered, count)) == count
    gateways[0].wait_until(lambda: len(ada.usage(nats_url)) == count + 3)
    # A reservation begins before what its record tells and ends after it; records are rounded to
    # milliseconds.
    moments = [(record.at - record.seconds + 0.001, 1) for record in ada.usage(nats_url)]
    moments += [(record.at - 0.001, -1) for record in ada.usage(nats_url)]
    running = most = 0
    for _, change in sorted(moments):
        running += change
        most = max(most, running)
    assert most == 3


@pytest.mark.parametrize("scale", SCALES)
def test_a_budget_is_spent_to_its_last_token_by_answers_that_come_together(
    gateways: list[Gateway], scale: int
) -> None:
    ada = Customer(gateways, budget=2500 * scale)
    # Each takes a lease, asks for another in its middle and is cut off where there is none.
    spent = sum(at_once(lambda i: ada.stream(i, 20, 3000), 12 * scale))
    assert 2500 * scale - 21 < spent <= 2500 * scale
    left = 2500 * scale - spent
    assert ada.ask(1, 1, max(1, left - 1)) == (left if left > 1 else 0)
    assert ada.ask(2, 1, 1) == 0


@pytest.mark.parametrize("waits", [False, pytest.param(True, marks=pytest.mark.long)])
async def test_what_a_killed_gateway_held_is_free_when_its_lease_has_run_out(
    gateways: list[Gateway],
    slow: Gateway,
    slow_flags: list[str],
    shared_redis_url: str,
    waits: bool,
) -> None:
    """The lease's end is brought forward, or waited for."""
    with gateways_of(slow_flags, 1) as [doomed]:
        ada = Customer(
            [doomed, slow, *gateways], concurrency=2, tokens_per_minute=1000, budget=1000
        )
        ada.gateways = [doomed]
        with contextlib.suppress(httpx.TransportError), ada.holding(range(2), 10, 490):
            doomed.stage.kill()
    ada.gateways = gateways
    assert not any(ada.ask(i, 1, 1) for i in range(3)), "nobody can tell yet whether it still runs"
    async with Store.open(shared_redis_url) as store:
        leases = f"leases:{{tenant:{ada.uid}}}"
        seconds, micros = await store.command("TIME")
        now = int(seconds) * 1000 + int(micros) // 1000
        ends = {
            each: float(await store.command("ZSCORE", leases, each))
            for each in await store.command("ZRANGE", leases, 0, -1)
        }
        assert len(ends) == 2
        assert all(end <= now + LEASE_MS for end in ends.values())
        for each in () if waits else ends:
            await store.command("ZADD", leases, "XX", 0, each)
    gateways[0].wait_until(lambda: ada.ask(0, 1, 1) == 2, LEASE_MS / 1e3 + 60)
    ada.gateways = [slow]
    with ada.holding(range(2), 1, 400):
        ada.gateways = gateways
        assert not ada.ask(2, 1, 1), "two run again, and no third"
    # The prompts were computed; of the answers counts what the gateway had told.
    assert ada.ask(0, 1, 979) == 0
