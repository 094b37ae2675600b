"""Requests by model on all gateways: told over a real bus, asked over REST."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import httpx

from headwater.gateway.stages import cluster_demand
from headwater.gateway.stages.cluster_demand import ClusterDemand
from headwater.services.runtime.bus import Bus
from headwater.services.stack.embedded import start_nats
from tests.gateway.conftest import GatewayStarter
from tests.gateway.processes import Behind, Gateway

Models = dict[str, tuple[int, int]]


@contextlib.asynccontextmanager
async def gateway_with(
    nats_url: str, models: Models, name: str = "", clock: list[float] | None = None
) -> AsyncIterator[ClusterDemand]:
    def read() -> Mapping[str, tuple[int, int]]:
        return models

    now = clock or [0.0]
    async with Bus.open(nats_url) as bus:
        demand = ClusterDemand(bus, name or uuid.uuid4().hex, read, clock=lambda: now[0])
        async with demand.running():
            yield demand


async def until(demand: ClusterDemand, model: str, counts: tuple[int, int] | None) -> None:
    async with asyncio.timeout(60):
        while demand.of(model) != counts:  # noqa: ASYNC110 (another gateway's words)
            await asyncio.sleep(0.02)


async def test_each_gateway_knows_the_sum_and_that_the_last_request_ended(nats_url: str) -> None:
    model = uuid.uuid4().hex
    here: Models = {model: (3, 0)}
    there: Models = {model: (2, 2)}
    async with gateway_with(nats_url, here) as first, gateway_with(nats_url, there) as second:
        await until(first, model, (5, 2))
        await until(second, model, (5, 2))
        here[model] = (0, 0)
        await until(second, model, (2, 2))
        there[model] = (0, 0)
        await until(first, model, (0, 0))
        assert second.of("no gateway's model") is None


async def test_a_gateway_that_died_counts_for_a_few_seconds(nats_url: str) -> None:
    model = uuid.uuid4().hex
    clock = [100.0]
    async with gateway_with(nats_url, {model: (0, 0)}, clock=clock) as left:
        async with gateway_with(nats_url, {model: (4, 0)}):
            await until(left, model, (4, 0))
        clock[0] += cluster_demand.EXPIRY_SECONDS
        assert left.of(model) == (0, 0)


async def test_the_last_demand_of_others_counts_while_the_bus_is_away(
    tmp_path: Path, kept: dict[str, Any]
) -> None:
    model = uuid.uuid4().hex
    clock = [100.0]
    server = await start_nats(tmp_path, **kept)
    async with (
        gateway_with(server.url, {model: (4, 0)}),
        gateway_with(server.url, {}, clock=clock) as left,
    ):
        await until(left, model, (4, 0))
        await server.stop()
        # Until its connection is lost, a silence of others is theirs.
        async with asyncio.timeout(60):
            while left._bus.connected:  # noqa: ASYNC110 (a server that ends)
                await asyncio.sleep(0.02)
        clock[0] += 1000 * cluster_demand.EXPIRY_SECONDS
        assert left.of(model) == (4, 0)


async def test_a_gateway_without_a_bus_knows_its_own_requests() -> None:
    async with (
        Bus.open(None) as bus,
        ClusterDemand(bus, "alone", lambda: {"m": (1, 1)}).running() as demand,
    ):
        assert demand.of("m") == (1, 1)


def test_an_autoscaler_reads_the_demand_without_a_key(gateway: Gateway) -> None:
    (model,) = gateway.client.get("/v1/models").json()["data"]
    idle = {"model": model["id"], "requests": 0, "requests_without_replica": 0}
    # The gateway may not have noticed yet that clients of other tests have left.
    gateway.first(
        lambda: gateway.client.get(f"/demand/{model['id']}").json(),
        lambda reported: reported == idle,
    )
    assert gateway.client.get("/demand/no/such-model").status_code == 404


def test_a_name_is_decoded_as_autoscalers_encode_it(gateway: Gateway) -> None:
    refused = gateway.client.get("/demand/no/such%3F%20100%25%2B").json()["error"]
    assert "no/such? 100%+" in refused["message"]


def test_a_request_that_waits_for_a_first_replica_is_demand(
    behind: Behind, start_gateway: GatewayStarter, nats_url: str
) -> None:
    text_alone = Behind(behind.processor, behind.output_processor, ())
    flags = (f"--nats-url={nats_url}", "--cold-start-timeout=60", "--sse-keep-alive=0.2")
    flags += ("--ready-needs-engine=never",)
    with start_gateway(text_alone, *flags) as holder, start_gateway(text_alone, *flags) as asked:
        (model,) = asked.client.get("/v1/models").json()["data"]
        url = f"/demand/{model['id']}"
        body = {"model": model["id"], "prompt": "Hi", "max_tokens": 1}
        with (
            contextlib.suppress(httpx.ReadTimeout),
            holder.client.stream("POST", "/v1/completions", json=body | {"stream": True}),
        ):
            asked.wait_until(lambda: asked.client.get(url).json()["requests_without_replica"] == 1)
        asked.wait_until(lambda: asked.client.get(url).json()["requests"] == 0)
