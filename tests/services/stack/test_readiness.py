"""What is said of a line that does not get ready."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from headwater.services.runtime.tasks import owned_task
from headwater.services.stack.readiness import until_ready
from tests.gateway.processes import gateway_stage, started


@pytest.mark.parametrize("is_nats_there", [False, True])
async def test_waiting_for_a_cluster_prints_what_is_missing(
    is_nats_there: bool, nats_url: str
) -> None:
    gone = "nats://me:secret@127.0.0.1:1"
    servers = {"NATS": f"{gone},{nats_url}" if is_nats_there else gone, "Redis": None}
    reported: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    stage = gateway_stage()
    with started(stage):
        async with (
            httpx.AsyncClient(base_url=f"http://{stage.addresses['rest']}", timeout=60) as gateway,
            owned_task(until_ready(gateway, servers, reported.set_result, late_seconds=0.0)),
        ):
            sent = await reported
    if is_nats_there:
        assert sent == "still waiting for: processor, output processor, engine"
    else:
        assert sent == "still waiting: no server answers at 127.0.0.1:1 (NATS)"


async def test_an_address_of_nats_without_a_scheme_is_asked_as_well() -> None:
    reported: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    starting = httpx.MockTransport(lambda _: httpx.Response(503, json={"missing": ["engine"]}))
    async with (
        httpx.AsyncClient(base_url="http://gateway", transport=starting) as gateway,
        owned_task(
            until_ready(gateway, {"NATS": "127.0.0.1:1"}, reported.set_result, late_seconds=0.0)
        ),
    ):
        assert await reported == "still waiting: no server answers at 127.0.0.1:1 (NATS)"


@pytest.mark.parametrize(
    ("url", "sent"),
    [
        ("redis://:secret@127.0.0.1:1", "127.0.0.1:1"),
        (
            "redis+sentinel://:a@127.0.0.1:1,127.0.0.1:2/b?sentinel_password=c",
            "127.0.0.1:1, 127.0.0.1:2",
        ),
    ],
    ids=["a server", "Sentinels"],
)
async def test_a_start_without_the_redis_that_was_named_says_so(url: str, sent: str) -> None:
    reported = list[str]()
    servers = {"NATS": None, "Redis": url}
    ready = httpx.MockTransport(lambda _: httpx.Response(200, json={"missing": []}))
    async with httpx.AsyncClient(base_url="http://gateway", transport=ready) as gateway:
        await until_ready(gateway, servers, reported.append)
    assert reported == [f"going on without Redis: no server answers at {sent}"]


async def test_a_gateway_that_is_too_busy_to_answer_in_time_is_asked_again() -> None:
    answers = iter([503, None, None, 200])

    def answer(request: httpx.Request) -> httpx.Response:
        if (status := next(answers)) is None:
            raise httpx.ReadTimeout("", request=request)
        return httpx.Response(status, json={"missing": ["engine"]})

    async with httpx.AsyncClient(
        base_url="http://gateway", transport=httpx.MockTransport(answer)
    ) as gateway:
        await until_ready(gateway, {}, lambda _: None)
    assert list(answers) == []
