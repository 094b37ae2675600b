"""The order in which requests begin that came at once."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import select
import signal
import socket
import time
from collections import Counter

import pytest

from headwater.gateway.tenancy.fair_start import FairStart
from tests.gateway.processes import MODEL, Gateway

NUM_REQUESTS = 200


async def begun(starts: FairStart, tenant: str, order: list[str]) -> None:
    if not starts.begin_at_once(tenant):
        await starts.wait(tenant)
    order.append(tenant)


async def test_requests_of_tenants_begin_in_turn_in_any_order_of_arrival() -> None:
    starts = FairStart()
    order = list[str]()
    await asyncio.gather(*(begun(starts, tenant, order) for tenant in [*"aaaaaa", *"bb", "c"]))
    # The first one waits for nobody.
    assert "".join(order) == "abcabaaaa"


async def test_a_pass_of_the_event_loop_begins_one_request() -> None:
    starts = FairStart()
    order = list[str]()
    passes = list[int]()
    requests = asyncio.gather(*(begun(starts, "a", order) for _ in range(20)))
    while not requests.done():
        before = len(order)
        await asyncio.sleep(0)
        passes.append(len(order) - before)
    assert Counter(passes)[1] == 20
    assert max(passes) == 1


async def test_a_client_that_left_takes_no_turn_and_later_requests_begin_at_once() -> None:
    starts = FairStart()
    order = list[str]()
    tasks = [asyncio.create_task(begun(starts, tenant, order)) for tenant in "aabb"]
    await asyncio.sleep(0)
    assert starts.num_waiting == 3
    tasks[2].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert (order, starts.num_waiting) == (["a", "b", "a"], 0)
    await asyncio.sleep(0)
    assert starts.begin_at_once("a")


async def test_a_flood_leaves_half_of_the_loop_to_another_tenant_that_is_there() -> None:
    """Beside 3,000 calls of one tenant, each of the passes that a neighbour's request takes waited
    for the beginning of one."""
    starts = FairStart()
    began_at: list[float] = []
    loop = asyncio.get_running_loop()

    async def costly() -> None:
        await begun(starts, "flood", [])
        began_at.append(loop.time())
        until = time.thread_time() + 0.005
        while time.thread_time() < until:
            pass

    assert starts.begin_at_once("neighbour")
    await asyncio.gather(*(costly() for _ in range(10)))
    gaps = [later - earlier for earlier, later in itertools.pairwise(began_at)]
    # Timers may end a little early by the loop's clock.
    assert min(gaps) >= 2 * 0.005 - 0.002


async def test_another_tenant_does_not_wait_for_the_end_of_a_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(FairStart, "_seconds_to_rest", lambda starts: 3600.0)
    starts = FairStart()
    order = list[str]()
    assert starts.begin_at_once("b")
    flood = [asyncio.create_task(begun(starts, "a", order)) for _ in range(50)]
    for _ in range(5):
        await asyncio.sleep(0)
    assert order == ["a"]
    async with asyncio.timeout(60):
        await begun(starts, "b", order)
    assert order == ["a", "b"]
    for each in flood:
        each.cancel()
    await asyncio.gather(*flood, return_exceptions=True)


def test_a_request_beside_a_flood_of_another_tenant_is_answered_before_most_of_it(
    gateway: Gateway,
) -> None:
    host, _, port = gateway.rest.removeprefix("http://").rpartition(":")
    with contextlib.ExitStack() as scope:
        *flood, last = (
            scope.enter_context(socket.create_connection((host, int(port)), timeout=60))
            for _ in range(NUM_REQUESTS + 1)
        )
        gateway.wait_until(lambda: gateway.metric("headwater_num_connections") > NUM_REQUESTS)
        # All requests are there when the gateway looks again.
        os.kill(gateway.stage.process.pid, signal.SIGSTOP)
        try:
            for connection in flood:
                connection.sendall(request_of("a"))
            last.sendall(request_of("b"))
        finally:
            os.kill(gateway.stage.process.pid, signal.SIGCONT)
        assert last.recv(12) == b"HTTP/1.1 200"
        answered, _, _ = select.select(flood, [], [], 0)
        assert len(answered) < NUM_REQUESTS / 2
        # All of it is answered.
        for connection in flood:
            assert connection.recv(12) == b"HTTP/1.1 200"


def request_of(tenant: str) -> bytes:
    body = json.dumps({"model": MODEL, "prompt": "river " * 200})
    head = [
        "POST /tokenize HTTP/1.1",
        "host: localhost",
        f"x-tenant: {tenant}",
        "content-type: application/json",
        f"content-length: {len(body)}",
    ]
    return ("\r\n".join(head) + "\r\n\r\n" + body).encode()
