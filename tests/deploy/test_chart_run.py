"""The chart at work: its pods run here as processes, in long tests as containers, and engines come
and go as KEDA would have them."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import platform
import shutil
import sys
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from headwater.services.models.store import default_cache_dir
from headwater.services.runtime.tasks import owned_task
from tests.deploy.autoscaler import Autoscaler
from tests.deploy.chart import Values, applied, of_kind
from tests.deploy.docker_launcher import DockerLauncher, missing_for
from tests.deploy.kube_api import Object
from tests.deploy.launcher import ProcessLauncher
from tests.deploy.local_cluster import NODES, LocalCluster
from tests.deploy.local_pod import LocalPod
from tests.gateway.processes import UNDRAFTED

# Where it is built for, a library that does not load is an error.
if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
    pytest.skip("Helm's library is built for Linux on x86-64", allow_module_level=True)

MODEL = "smollm2-135m-instruct"
ENGINES = "hw-engine-demo"
GATEWAY = "hw-gateway"
SMALL: Values = {
    # No weights, everything else real; slow enough that answers are under way while pods come and
    # go.
    "engineDefaults": {
        "args": [
            "--executor=simulated",
            "--simulated-step-seconds=0.05",
            "--max-model-len=8192",
            "--num-blocks=4096",
        ],
        "minReplicas": 0,
        "maxReplicas": 2,
        "targetRequests": 4,
        "drainSeconds": 20,
    },
    "gateway": {"preStopSeconds": 1, "drainSeconds": 20},
    "outputProcessor": {"drainSeconds": 20},
    "keda": {"pollingInterval": 1, "cooldownPeriod": 1, "stabilizationSeconds": 20},
    "probes": {"periodSeconds": 1},
}
SECONDS_TO_FIRST_TOKEN = 12.0
CONTAINERS = pytest.param("containers", marks=[pytest.mark.long, pytest.mark.timeout(1800)])
BUILT: Values = {
    # As `docker compose build` makes them, and servers without the digests that the chart pins.
    "images": {
        "front": {"tag": "latest"},
        "engineCpu": {"tag": "latest"},
        "nats": {"tag": "2", "digest": ""},
        "valkey": {"digest": ""},
    },
    # The chart's own: containers start more slowly than forks, and streams wait for an engine that
    # comes.
    "gateway": {"preStopSeconds": 1},
    "outputProcessor": {},
}
IMAGES = ("headwater-front:latest", "headwater-engine-cpu:latest", "nats:2", "valkey/valkey:8")


class Run:
    """A release that runs, and clients of it."""

    def __init__(self, cluster: LocalCluster, scaler: Autoscaler, key: str) -> None:
        self.cluster = cluster
        self.scaler = scaler
        self._headers = {"authorization": f"Bearer {key}"}
        self._expected: dict[tuple[int, int], str] = {}
        self.num_answers = 0

    async def until(self, holds: Callable[[], bool], seconds: float = 90.0) -> None:
        async with asyncio.timeout(seconds):
            while not holds():  # noqa: ASYNC110 (other processes)
                await asyncio.sleep(0.05)

    async def answer(self, idx: int, num_tokens: int) -> tuple[str, float]:
        """A streamed completion, over a connection of its own as proxies make them; seconds to its
        first token."""
        at = self.cluster.endpoint(GATEWAY, 80)
        began = time.monotonic()
        first = 0.0
        pieces = []
        body = {
            "model": MODEL,
            "prompt": f"Tale {idx} of a river.",
            "max_tokens": num_tokens,
            "temperature": 0,
        }
        async with (
            httpx.AsyncClient(timeout=60, verify=False) as client,
            client.stream(
                "POST",
                f"http://{at}/v1/completions",
                json=body | {"stream": True, "ignore_eos": True} | UNDRAFTED,
                headers=self._headers,
            ) as reply,
        ):
            assert reply.status_code == 200, await reply.aread()
            async for line in reply.aiter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line[6:])
                    assert "error" not in event, event
                    first = first or time.monotonic() - began
                    pieces += event["choices"]
        assert pieces[-1]["finish_reason"] == "length"
        return "".join(each["text"] for each in pieces), first

    async def ask(self, idx: int, num_tokens: int = 60) -> float:
        """An answer that must be what it was the first time; seconds to its first token."""
        text, first = await self.answer(idx, num_tokens)
        assert text == self._expected.setdefault((idx, num_tokens), text)
        self.num_answers += 1
        return first

    @contextlib.asynccontextmanager
    async def load(self, num_clients: int) -> AsyncIterator[None]:
        """Streams from so many clients, one after another each, for the length of a scope. All of
        them must succeed."""
        is_over = asyncio.Event()

        async def client(idx: int) -> None:
            while not is_over.is_set():
                await self.ask(idx)

        async with asyncio.TaskGroup() as clients:
            for idx in range(num_clients):
                clients.create_task(client(idx))
            yield
            is_over.set()

    async def until_zero(self) -> None:
        await self.until(lambda: not any(pod.owner == ENGINES for pod in self.cluster.pods))

    def killed(self) -> list[str]:
        """Pods that were started again, or were ended before they had drained."""
        pods = [*self.cluster.pods, *self.cluster.ended]
        return [pod.name for pod in pods if pod.num_restarts or pod.was_killed]


@pytest.fixture(scope="module", params=["processes", CONTAINERS])
def in_containers(request: pytest.FixtureRequest) -> bool:
    if request.param == "containers" and (missing := missing_for(IMAGES)):
        pytest.skip(missing)
    return bool(request.param == "containers")


@pytest.fixture(scope="module")
def installs(in_containers: bool) -> list[list[Object]]:
    """Of the install and of an upgrade that changes each stage's pods."""
    values = SMALL | (BUILT if in_containers else {})
    (made,) = applied([[values, values | {"logLevel": "warning"}]])
    return made


def link(shared: Path, place: Path) -> None:
    place.symlink_to(shared)


def copy(shared: Path, place: Path) -> None:
    """For containers, which see their volumes alone and have a user of their own."""
    shutil.copytree(shared, place)
    for path in [place, *place.rglob("*")]:
        path.chmod(0o777 if path.is_dir() else 0o666)


@contextlib.asynccontextmanager
async def running(
    cluster: LocalCluster, objects: list[Object], put: Callable[[Path, Path], Any] = link
) -> AsyncIterator[Run]:
    """The release, rolled out, with its autoscaler. Its job finds what tests have downloaded and
    converted before."""
    volume = cluster.claims / "hw-models"
    (volume / "models").mkdir(parents=True)
    for name, shared in (
        ("models", default_cache_dir() / MODEL),
        ("", default_cache_dir() / "kernels"),
    ):
        shared.mkdir(parents=True, exist_ok=True)
        put(shared, volume / name / shared.name)
    async with cluster.running():
        cluster.apply(objects)
        key = base64.b64decode(of_kind(objects, "Secret")["hw-access"]["data"]["api-key"]).decode()
        scaler = Autoscaler(cluster, ENGINES)
        run = Run(cluster, scaler, key)
        await run.until(cluster.is_rolled_out, 200)
        async with owned_task(scaler.run()):
            yield run


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def run(
    installs: list[list[Object]],
    in_containers: bool,
    tmp_path_factory: pytest.TempPathFactory,
    kept: dict[str, Any],
) -> AsyncIterator[Run]:
    launcher = DockerLauncher if in_containers else partial(ProcessLauncher, kept=kept)
    cluster = LocalCluster(tmp_path_factory.mktemp("cluster"), launcher)
    async with running(cluster, installs[0], copy if in_containers else link) as run:
        yield run


pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]


@pytest.mark.long
async def test_the_first_request_from_zero_starts_an_engine_and_is_answered(run: Run) -> None:
    await run.until_zero()
    starts = run.scaler.num_starts
    await run.ask(0)
    assert run.scaler.num_starts > starts


@pytest.mark.long
async def test_the_demo_model_answers_from_zero_within_seconds(
    in_containers: bool, tmp_path: Path, kept: dict[str, Any]
) -> None:
    """With weights, and processes that import what they need."""
    values = SMALL | {"engineDefaults": {"threads": 1}} | (BUILT if in_containers else {})
    ((objects,),) = applied([[values]])
    launcher = (
        DockerLauncher if in_containers else partial(ProcessLauncher, kept=kept, forks_stages=False)
    )
    async with running(
        LocalCluster(tmp_path, launcher), objects, copy if in_containers else link
    ) as run:
        for _ in range(3):
            await run.until_zero()
            seconds = await run.ask(0, num_tokens=8)
            print(f"first token after {seconds:.2f} s")
            assert seconds < SECONDS_TO_FIRST_TOKEN


async def cycles(run: Run, count: int) -> None:
    ends = run.scaler.num_ends
    for _ in range(count):
        await run.until_zero()
        starts = run.scaler.num_starts
        async with run.load(4):
            await run.until(lambda: bool(run.cluster.ready_pods(ENGINES)))
            await asyncio.sleep(1)
        assert run.scaler.num_starts == starts + 1
    await run.until_zero()
    assert run.scaler.num_ends >= ends + count
    assert run.killed() == []


@pytest.mark.long
async def test_no_request_is_lost_while_engines_go_to_zero_and_come_back(run: Run) -> None:
    await cycles(run, 5)
    assert run.num_answers >= 5 * 4


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("in_containers", ["processes"], indirect=True)
async def test_no_request_is_lost_in_fifty_cycles(run: Run) -> None:
    await cycles(run, 50)


@pytest.mark.long
async def test_every_stage_is_replaced_under_streams_that_do_not_notice(
    run: Run, installs: list[list[Object]]
) -> None:
    async with run.load(16):
        await run.until(lambda: len(run.cluster.ready_pods(ENGINES)) == 2)
        before = {pod.name for pod in run.cluster.pods}
        run.cluster.apply(installs[1])
        await run.until(run.cluster.is_rolled_out, 180)
        stages = {pod.owner for pod in run.cluster.pods if pod.name not in before}
    assert stages == of_kind(installs[1], "Deployment").keys()
    assert run.killed() == []


@pytest.mark.long
@pytest.mark.parametrize(
    "has_servers", [False, True], ids=["without servers", "with NATS and Valkey"]
)
async def test_a_node_is_drained_under_streams_that_do_not_notice(
    run: Run, has_servers: bool
) -> None:
    async with run.load(16):
        await run.until(lambda: len(run.cluster.ready_pods(ENGINES)) == 2)
        (servers,) = {
            pod.node for name in ("hw-nats", "hw-valkey") for pod in run.cluster.pods_of(name)
        }
        (node,) = {servers} if has_servers else set(NODES) - {servers}
        assert {pod.owner for pod in run.cluster.pods if pod.node == node} >= {GATEWAY, ENGINES}
        async with asyncio.timeout(120):
            await run.cluster.drain_node(node)
        await run.until(run.cluster.is_rolled_out)
    run.cluster.cordoned.clear()
    assert run.killed() == []


@pytest.mark.long
async def test_a_pod_that_loads_for_longer_than_live_probes_allow_is_not_killed(
    tmp_path: Path, kept: dict[str, Any]
) -> None:
    """The probes are those of the chart's engines; without the first of them such a pod is started
    again and again."""
    ((objects,),) = applied([[SMALL]])
    template = of_kind(objects, "Deployment")[ENGINES]["spec"]["template"]
    (engine,) = template["spec"]["containers"]
    live = engine["livenessProbe"]
    seconds = live["periodSeconds"] * live["failureThreshold"] + 3
    launcher = ProcessLauncher({}, kept)

    def loading(address: str, **spared: Any) -> LocalPod:
        container = {
            name: each
            for name, each in engine.items()
            if name not in {"env", "envFrom", "volumeMounts", *spared}
        }
        container |= {
            "command": [
                sys.executable,
                "-m",
                "tests.deploy.slow_stage",
                address,
                "9000",
                str(seconds),
            ],
            "args": [],
        }
        spec = {"containers": [container], "terminationGracePeriodSeconds": 1}
        return LocalPod(
            name=address,
            spec=spec,
            labels={},
            address=address,
            node="",
            launcher=launcher,
            secrets={},
            folder=tmp_path,
            claims=tmp_path,
        )

    subnet = f"127.{2 + os.getpid() % 250}.255"
    patient = loading(f"{subnet}.1")
    hasty = loading(f"{subnet}.2", startupProbe=None)
    lives = [asyncio.create_task(pod.run()) for pod in (patient, hasty)]
    async with asyncio.timeout(60):
        while not patient.ready or not hasty.num_restarts:  # noqa: ASYNC110 (other processes)
            await asyncio.sleep(0.05)
    assert patient.num_restarts == 0
    for pod in (patient, hasty):
        pod.terminate()
    await asyncio.gather(*lives)
    launcher.close()
