"""Each alert fires in a real Prometheus that scrapes deployments which are broken on purpose, and
none before they are.

Not here: the volume of a pod, whose figures are a kubelet's (test_alerts.py has its series).
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import pytest_asyncio
import yaml

from headwater.proto import engine_pb2, engine_pb2_grpc, events_pb2
from headwater.services.runtime import subjects
from headwater.services.runtime.bus import Bus
from headwater.services.runtime.served_model import model_key
from headwater.services.stack.embedded import start_nats, start_valkey
from tests.deploy.chart import CHART
from tests.deploy.prometheus_server import PROGRAM, Prometheus
from tests.free_ports import free_port
from tests.gateway.processes import (
    MODEL,
    UNDRAFTED,
    Gateway,
    Stage,
    completion_body,
    engine_stage,
    gateway_stage,
    output_processor_stage,
    processor_stage,
)
from tests.own_certificate import own_certificate

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        PROGRAM is None,
        reason="prometheus is missing (Debian: apt install prometheus; or HEADWATER_PROMETHEUS)",
    ),
]
RULES = CHART / "files/rules.yaml"
SECONDS = 150.0
"""Within which an alert fires."""
ADMIN = "admin-key-of-the-house"
WORDS = ("river", "mountain", "forest", "valley", "desert", "harbour")
PAGE = "--metrics-port=0"
ELSEWHERE = {"HeadwaterVolumeIsFull"}
ABSENT = {
    f"HeadwaterHasNo{stage}" for stage in ("Gateway", "Processor", "OutputProcessor", "Engine")
}


class World:
    """Deployments, and the Prometheus that scrapes all of their processes."""

    def __init__(self, prometheus: Prometheus, folder: Path) -> None:
        self.prometheus = prometheus
        self.folder = folder
        self.stages: list[Stage] = []
        self.gateways: list[Gateway] = []

    def start(self, *stages: Stage) -> None:
        self.stages += stages
        for stage in stages:
            stage.wait_ready()
        self.prometheus.watch([each.addresses["metrics"] for each in self.stages])

    def gateway(self, *flags: str, **more: Any) -> Gateway:
        stage = gateway_stage(PAGE, *flags, **more)
        self.start(stage)
        self.gateways.append(gateway := Gateway(stage))
        return gateway

    def send(self, gateway: Gateway, *, key: str = "", prompt: Any = "A tale", **more: Any) -> None:
        """Sends a request whose answer nobody waits for."""
        headers = {"authorization": f"Bearer {key}"} if key else {}
        body = completion_body(prompt, **more)

        def post() -> None:
            with contextlib.suppress(httpx.HTTPError):
                url = f"{gateway.rest}/v1/completions"
                httpx.post(url, json=body, headers=headers, timeout=300)

        threading.Thread(target=post, daemon=True).start()

    def until(self, *alerts: str, during: Callable[[], object] = lambda: None) -> set[str]:
        """Does something again and again until the alerts have fired; returns all that have."""
        fired: set[str] = set()
        end = time.monotonic() + SECONDS
        while not fired >= set(alerts):
            during()
            fired |= self.prometheus.firing().keys()
            assert time.monotonic() < end, f"{set(alerts) - fired} did not fire"
            time.sleep(0.2)
        return fired

    def close(self) -> None:
        for gateway in self.gateways:
            gateway.client.close()
        for stage in self.stages:
            stage.kill()
        for stage in self.stages:
            stage.close()


def on_a_full_disk(folder: Path) -> Callable[..., subprocess.Popen[bytes]]:
    """Starts a stage in a mount namespace of its own, where the folder is a full disk of 1 MiB."""
    full = f"mount -t tmpfs -o size=1m tmpfs {folder} && head -c 1000000 /dev/zero > {folder}/full"

    def start(module: str, *flags: str, stderr: int, **descriptors: int) -> Any:
        return subprocess.Popen(
            [
                *("unshare", "-rm", "sh", "-c", f'{full} && exec "$@"', "sh"),
                *(sys.executable, "-m", module, *flags),
            ],
            env=os.environ | {name: str(number) for name, number in descriptors.items()},
            pass_fds=tuple(descriptors.values()),
            stderr=stderr,
        )

    return start


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with Prometheus(tmp_path, RULES).running() as prometheus:
        world = World(prometheus, tmp_path)
        try:
            yield world
        finally:
            world.close()


@pytest_asyncio.fixture
async def servers(free_dir: Path, kept: dict[str, Any]) -> AsyncIterator[tuple[str, str]]:
    """Addresses of a NATS with streams and of a Redis."""
    nats = await start_nats(free_dir, jetstream=free_dir / "streams", **kept)
    valkey = await start_valkey(free_dir, **kept)
    yield nats.url, valkey.url
    await valkey.stop()
    await nats.stop()


def test_every_alert_fires_where_a_deployment_is_broken(
    world: World, demo_folder: Path, servers: tuple[str, str]
) -> None:
    bus, store = f"--nats-url={servers[0]}", f"--redis-url={servers[1]}"
    fired = nothing_runs(world)
    processor = processor_stage(demo_folder, bus, PAGE, "--replica-id=processor")
    output = output_processor_stage(demo_folder, bus, PAGE)
    engines = [engine_stage(bus, PAGE, "--simulated-step-seconds=0.02") for _ in range(2)]
    world.start(processor, output, *engines)
    text = [f"--processor={processor.address}", f"--output-processor={output.address}"]
    storage = "--storage-bytes=8388608"
    gateway = world.gateway(bus, store, f"--admin-key={ADMIN}", storage)
    gateway.wait_until(gateway.is_ready)
    world.prometheus.wait_until_well(len(world.stages))

    fired |= certificates_disks_and_servers(world, text)
    fired |= engines_that_do_not_come(world, text)
    fired |= slow_and_stopped_engines(world, text)
    fired |= a_cache_that_is_too_small(world, text)
    fired |= a_call_without_the_token(world, text)
    fired |= a_full_stream_and_a_spent_budget(world, gateway)
    fired |= lost_events(world, gateway, servers[0], engines[0])
    fired |= engines_that_die(world, gateway, bus, engines)
    fired |= a_processor_that_starts_again(world, demo_folder, bus, processor)
    fired |= everything_is_gone(world)
    rules = yaml.safe_load(RULES.read_text())["groups"][0]["rules"]
    assert fired == {rule["alert"] for rule in rules} - ELSEWHERE


def nothing_runs(world: World) -> set[str]:
    return world.until("HeadwaterIsNotScraped", *ABSENT)


def certificates_disks_and_servers(world: World, text: list[str]) -> set[str]:
    cert, key = own_certificate(world.folder, days=3)
    shows = [f"--tls-cert-file={cert}", f"--tls-key-file={key}"]
    nowhere = f"--redis-url=redis://127.0.0.1:{free_port()}"
    (disk := world.folder / "disk").mkdir()
    on_disk = f"--tenants-file={disk / 'tenants.json'}"
    world.gateway(*text, nowhere, *shows, on_disk, start=on_a_full_disk(disk))
    return world.until("HeadwaterCertificateEnds", "HeadwaterGoesWithout", "HeadwaterDiskIsFull")


def engines_that_do_not_come(world: World, text: list[str]) -> set[str]:
    patient = world.gateway(*text, "--cold-start-timeout=300")
    hasty = world.gateway(*text)
    world.send(patient)
    return world.until(
        "HeadwaterRequestsWaitForAnEngine",
        "HeadwaterRequestsFail",
        during=lambda: hasty.client.post("/v1/completions", json=completion_body()),
    )


def slow_and_stopped_engines(world: World, text: list[str]) -> set[str]:
    engine = engine_stage(PAGE, "--simulated-step-seconds=6", "--hang-limit=600")
    world.start(engine)
    gateway = world.gateway(*text, f"--replica={engine.address}", "--max-running=1")
    world.send(gateway)
    fired = world.until("HeadwaterFirstTokensAreSlow")
    for _ in range(110):
        world.send(gateway)
    fired |= world.until("HeadwaterQueueGrows")
    core = core_of(engine)
    os.kill(core, signal.SIGSTOP)
    try:
        return fired | world.until("HeadwaterEngineStandsStill")
    finally:
        os.kill(core, signal.SIGKILL)


def a_cache_that_is_too_small(world: World, text: list[str]) -> set[str]:
    """Without NATS the gateway learns nothing of what the engine evicts."""
    engine = engine_stage(PAGE, "--num-blocks=513", "--simulated-step-seconds=0.002")
    world.start(engine)
    gateway = world.gateway(*text, f"--replica={engine.address}")
    gateway.wait_until(gateway.is_ready)
    tales = [f"{word} " * 3200 for word in WORDS]

    def ask() -> None:
        for tale in tales:
            gateway.complete(tale, max_tokens=1)

    fired = world.until("HeadwaterPredictionsFail", during=ask)

    def crowd() -> None:
        gateway.complete([f"Tale {i}" for i in range(32)], max_tokens=400, ignore_eos=True)

    return fired | world.until("HeadwaterCacheIsTooSmall", during=crowd)


def a_call_without_the_token(world: World, text: list[str]) -> set[str]:
    token = world.folder / "token"
    token.write_text("a" * 64)
    token.chmod(0o600)
    engine = engine_stage(PAGE, f"--cluster-token-file={token}")
    world.start(engine)

    def call() -> None:
        with grpc.insecure_channel(engine.address) as channel, contextlib.suppress(grpc.RpcError):
            engine_pb2_grpc.EngineStub(channel).Info(engine_pb2.InfoRequest(), timeout=10)

    return world.until("HeadwaterStrangersCall", during=call)


def a_full_stream_and_a_spent_budget(world: World, gateway: Gateway) -> set[str]:
    admin = {"authorization": f"Bearer {ADMIN}"}
    asked = {"id": "ada", "limits": {"budget": 20, "budget_period": "day"}}
    added = gateway.client.post("/admin/tenants", json=asked, headers=admin)
    assert added.status_code == 201, added.text
    ada = {"authorization": f"Bearer {added.json()['key']}"}
    full = {"file": ("full.jsonl", io.BytesIO(bytes(400_000)))}

    def use() -> None:
        for file in (full, full):
            file["file"][1].seek(0)
            purpose = {"purpose": "batch"}
            gateway.client.post("/v1/files", headers=ada, files=file, data=purpose)
        gateway.client.post("/v1/completions", json=completion_body(), headers=ada)

    return world.until("HeadwaterStreamIsFull", "HeadwaterBudgetIsSpent", during=use)


def lost_events(world: World, gateway: Gateway, nats_url: str, engine: Stage) -> set[str]:
    """Batches of an engine's events are missing, and it does not answer who asks for them."""
    admin = {"authorization": f"Bearer {ADMIN}"}
    reported = gateway.client.get("/admin/replicas", headers=admin).json()["data"]
    [known] = [each for each in reported if each["address"] == engine.address]
    incarnation = events_pb2.Incarnation(replica_id=known["id"], epoch=int(known["epoch"], 16))
    late = events_pb2.KvEventBatch(incarnation=incarnation, seq=1_000_000)

    async def publish() -> None:
        async with Bus.open(nats_url) as bus:
            await bus.publish(
                subjects.kv_events(model_key(MODEL), known["id"]), late.SerializeToString()
            )
            await asyncio.sleep(0.2)

    os.kill(engine.process.pid, signal.SIGSTOP)
    try:
        return world.until("HeadwaterIndexIsBehind", during=lambda: asyncio.run(publish()))
    finally:
        os.kill(engine.process.pid, signal.SIGCONT)


def engines_that_die(world: World, gateway: Gateway, bus: str, engines: list[Stage]) -> set[str]:
    """Answers move each time, and batches of events that nobody repeats are missed."""
    key = added_key(gateway, "eve")
    fired: set[str] = set()
    for _ in range(3):
        for _ in range(4):
            world.send(gateway, key=key, max_tokens=2000, ignore_eos=True, **UNDRAFTED)
        gateway.wait_until(lambda: gateway.metric("headwater_num_streams") >= 4)
        engines.pop(0).kill()
        engines.append(another := engine_stage(bus, PAGE, "--simulated-step-seconds=0.02"))
        world.start(another)
        fired |= world.prometheus.firing().keys()
    return fired | world.until("HeadwaterAnswersMove", "HeadwaterStageIsGone")


def a_processor_that_starts_again(
    world: World, folder: Path, bus: str, processor: Stage
) -> set[str]:
    def again() -> None:
        nonlocal processor
        processor.kill()
        processor = processor_stage(folder, bus, PAGE, "--replica-id=processor")
        world.start(processor)

    return world.until("HeadwaterStageStartsAgain", during=again)


def everything_is_gone(world: World) -> set[str]:
    for stage in world.stages:
        stage.kill()
    return world.until("HeadwaterStageIsGone", *ABSENT)


def added_key(gateway: Gateway, tenant: str) -> str:
    admin = {"authorization": f"Bearer {ADMIN}"}
    added = gateway.client.post("/admin/tenants", json={"id": tenant}, headers=admin)
    return str(added.json()["key"])


def core_of(engine: Stage) -> int:
    """Process id of an engine's core."""
    (task,) = Path(f"/proc/{engine.process.pid}/task/{engine.process.pid}").glob("children")
    return int(task.read_text().split()[-1])
