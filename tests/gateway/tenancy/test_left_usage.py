"""What requests used that a killed gateway carried: one record each, whether or not NATS is there
at that moment."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
import nats.errors as nats_errors
import pytest

from headwater.proto import common_pb2, inference_pb2, inference_pb2_grpc, processor_pb2
from headwater.services.runtime.store import Store
from headwater.services.runtime.usage_log import LEFT, UsageRecord
from headwater.services.stack.embedded import EmbeddedServer, start_nats
from tests.gateway.processes import (
    MODEL,
    UNDRAFTED,
    Behind,
    Gateway,
    Stage,
    completion_body,
    engine_stage,
    gateway_stage,
    output_processor_stage,
    started,
)
from tests.gateway.request.test_resumed import RESUMABLE, id_of, resumed, whole_events
from tests.gateway.tenancy.test_three_gateways import ADMIN, LONG, Customer

ENDLESS: dict[str, Any] = {"max_tokens": LONG, "ignore_eos": True} | UNDRAFTED


def completion(gateway: Gateway, customer: Customer, prompt: Any, **more: Any) -> int:
    """Tokens that came before the gateway died."""
    body = completion_body(prompt, stream=True, return_token_ids=True, **ENDLESS | more)
    with gateway.client.stream(
        "POST", "/v1/completions", json=body, headers=customer.headers
    ) as reply:
        return sum(line.startswith("data: {") for line in reply.iter_lines())


def silent_completion(gateway: Gateway, customer: Customer, prompt: Any) -> None:
    body = completion_body(prompt, **ENDLESS)
    gateway.client.post("/v1/completions", json=body, headers=customer.headers)


def grpc_completion(gateway: Gateway, customer: Customer, prompt: list[int]) -> None:
    request = inference_pb2.CompleteRequest(
        model=MODEL,
        token_ids=processor_pb2.Prompt.TokenIds(ids=prompt),
        sampling=common_pb2.Sampling(**ENDLESS),
    )
    key = tuple(customer.headers.items())
    with grpc.insecure_channel(gateway.grpc) as channel:
        for _ in inference_pb2_grpc.InferenceStub(channel).CompleteStream(request, metadata=key):
            pass


@contextlib.contextmanager
def under_way(*asks: Callable[[], Any]) -> Iterator[None]:
    """Until the gateway dies, as far as they are concerned."""

    def run(ask: Callable[[], Any]) -> None:
        with contextlib.suppress(httpx.TransportError, grpc.RpcError):
            ask()

    threads = [threading.Thread(target=run, args=(ask,)) for ask in asks]
    for thread in threads:
        thread.start()
    yield
    for thread in threads:
        thread.join()


def by_prompt(records: list[UsageRecord]) -> dict[int, UsageRecord]:
    """Each prompt of these tests has a length of its own, and its request one record."""
    found = {record.prompt_tokens: record for record in records}
    assert len(found) == len(records), records
    return found


async def _renew_for_an_hour(customer: Customer, redis_url: str) -> None:
    async with Store.open(redis_url) as store:
        leases = f"leases:{{tenant:{customer.uid}}}"
        late = (time.time() + 3600) * 1000
        for each in await store.command("ZRANGE", leases, 0, -1):
            await store.command("ZADD", leases, "XX", late, each)


@dataclass
class Cluster:
    """Three gateways on one output processor, with a NATS that can be taken away."""

    runner: asyncio.Runner
    nats: EmbeddedServer
    nats_folder: Path
    output: Stage
    gateways: list[Gateway]
    redis_url: str

    def metric(self, name: str) -> float:
        """Of the output processor."""
        lines = httpx.get(
            f"http://{self.output.addresses['metrics']}/metrics", timeout=60
        ).text.splitlines()
        return float(next(line.split()[1] for line in lines if line.startswith(f"{name} ")))

    def carries(self, num_streams: int) -> bool:
        return self.metric("headwater_output_streams") == num_streams

    def used(self, customer: Customer) -> list[UsageRecord]:
        """What is there, while NATS may only be coming back."""
        with contextlib.suppress(ConnectionError, TimeoutError, nats_errors.Error):
            return customer.usage(self.nats.url)
        return []


@pytest.fixture(scope="module")
def cluster(
    behind: Behind,
    text_folder: Path,
    shared_redis_url: str,
    tmp_path_factory: pytest.TempPathFactory,
    kept: dict[str, Any],
) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("nats")
    with asyncio.Runner() as runner, contextlib.ExitStack() as servers:
        nats = runner.run(start_nats(folder, jetstream=folder / "js", **kept))
        servers.callback(lambda: runner.run(nats.stop()))
        output = output_processor_stage(text_folder, f"--nats-url={nats.url}", "--metrics-port=0")
        engine = engine_stage("--simulated-step-seconds=0.01")
        with started(output, engine):
            seeds = Behind(behind.processor, output.address, (engine.address,)).flags()
            flags = [
                *seeds,
                f"--nats-url={nats.url}",
                f"--redis-url={shared_redis_url}",
                f"--admin-key={ADMIN}",
            ]
            stages = [gateway_stage(*flags) for _ in range(3)]
            with started(*stages), contextlib.ExitStack() as clients:
                gateways = [clients.enter_context(Gateway(stage)) for stage in stages]
                for gateway in gateways:
                    gateway.wait_until(gateway.is_ready, 60.0)
                found = Cluster(runner, nats, folder, output, gateways, shared_redis_url)
                # A test may have killed the server and started another one.
                servers.callback(lambda: runner.run(found.nats.stop()))
                yield found


def kill_under_way(cluster: Cluster, ada: Customer) -> None:
    """A gateway with an answer of each kind; of one the client goes on elsewhere."""
    first, second, _ = cluster.gateways
    first.wait_until(lambda: cluster.carries(0), 60.0)
    body = completion_body([7] * 50, max_tokens=300, ignore_eos=True) | RESUMABLE
    with under_way(
        lambda: completion(first, ada, [7] * 10),
        lambda: completion(first, ada, [7] * 20, n=2, temperature=1),
        lambda: completion(first, ada, [[7] * 14, [7] * 16]),
        lambda: silent_completion(first, ada, [7] * 40),
        lambda: grpc_completion(first, ada, [7] * 60),
    ):
        first.wait_until(lambda: cluster.carries(7), 60.0)
        # The last to begin, since it ends by itself: with it among those that are counted, one of
        # the others could be missing.
        with first.client.stream(
            "POST", "/v1/completions", json=body, headers=ada.headers
        ) as reply:
            # Kept: an iterator that nobody has ends its stream.
            events = whole_events(reply.iter_lines())
            reported = [next(events), next(events)]
            first.stage.kill()
    assert resumed(second, id_of(reported[0]), 2, **ada.headers)[-1].endswith("[DONE]\n")


@pytest.mark.slow
def test_requests_of_a_killed_gateway_leave_one_record_each_and_what_they_had_reserved(
    cluster: Cluster,
) -> None:
    _, second, third = cluster.gateways
    ada = Customer(cluster.gateways, concurrency=8, budget=10**6)
    kill_under_way(cluster, ada)
    # No lease ends while this runs: what is free then is so for another reason.
    cluster.runner.run(_renew_for_an_hour(ada, cluster.redis_url))
    second.wait_until(lambda: len(cluster.used(ada)) == 6, 60.0)
    records = by_prompt(cluster.used(ada))
    assert {size: (each.prompts, each.outcome) for size, each in records.items()} == {
        size: (2 if size == 30 else 1, "done" if size == 50 else LEFT)
        for size in (10, 20, 30, 40, 50, 60)
    }
    assert records[50].output_tokens == 300
    # All that the engine sent was for these; what came behind the gateway's end is nobody's.
    assert sum(each.output_tokens for each in records.values()) <= cluster.metric(
        "headwater_output_tokens_total"
    )
    ada.gateways = [second, third]

    def holds_eight() -> bool:
        try:
            with ada.holding(range(8), 1, LONG):
                return True
        except AssertionError:
            return False

    second.wait_until(holds_eight, 60.0)
    shown = second.client.get(
        f"/admin/tenants/{ada.id}/usage", headers={"authorization": f"Bearer {ADMIN}"}
    ).json()
    assert sum(row["prompt_tokens"] for row in shown["data"]) >= 210
    assert {row["model"] for row in shown["data"]} == {MODEL}
    assert sorted(
        each.prompt_tokens for each in cluster.used(ada) if each.prompt_tokens != 1
    ) == sorted(records)


@pytest.mark.slow
def test_what_a_gateway_dies_with_while_nats_is_away_is_recorded_when_that_is_back(
    cluster: Cluster, kept: dict[str, Any]
) -> None:
    # Another test kills the first one.
    _, dying, other = cluster.gateways
    ada = Customer([dying, other])
    cluster.runner.run(cluster.nats.kill())
    assert ada.ask(0, 100, 5) == 105
    # None of this or of another test is taken for the next one.
    other.wait_until(lambda: cluster.carries(0), 60.0)
    with under_way(lambda: completion(dying, ada, [7] * 150)):
        other.wait_until(lambda: cluster.carries(1), 60.0)
        dying.stage.kill()
    other.wait_until(lambda: cluster.carries(0), 60.0)
    port = cluster.nats.port
    folder = cluster.nats_folder
    cluster.nats = cluster.runner.run(
        start_nats(folder, port=port, jetstream=folder / "js", **kept)
    )
    other.wait_until(lambda: len(cluster.used(ada)) == 2, 60.0)
    records = by_prompt(cluster.used(ada))
    assert (records[100].output_tokens, records[100].outcome) == (5, LEFT)
    assert records[150].outcome == LEFT
