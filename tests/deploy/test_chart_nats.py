"""NATS of three servers: as the chart renders them, and that configuration at work."""

from __future__ import annotations

import asyncio
import base64
import json
import platform
import subprocess
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import nats
import pytest
from nats.js import JetStreamContext
from nats.js.api import StreamConfig

from headwater.gateway.jobs.storage_bounds import PERCENT, set_bounds
from headwater.services.runtime.usage_log import STREAM
from headwater.services.stack.embedded import nats_binary
from tests.deploy.chart import applied, of_kind, refusals
from tests.deploy.kube_api import Object
from tests.deploy.test_chart import OF_OTHERS
from tests.free_ports import free_port

# Where it is built for, a library that does not load is an error.
if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
    pytest.skip("Helm's library is built for Linux on x86-64", allow_module_level=True)

pytestmark = pytest.mark.long
THREE: dict[str, Any] = {"nats": {"replicas": 3}}


@pytest.fixture(scope="module")
def objects() -> list[Object]:
    ((found,),) = applied([[THREE]])
    return found


def secret_of(objects: list[Object], name: str, key: str) -> str:
    return base64.b64decode(of_kind(objects, "Secret")[name]["data"][key]).decode()


def test_three_servers_find_each_other_and_go_one_at_a_time(objects: list[Object]) -> None:
    import kubernetes_validate  # noqa: PLC0415 (two seconds of every worker)

    for each in objects:
        if each["kind"] not in OF_OTHERS:
            kubernetes_validate.validate(each, "1.34", strict=True)
    servers = of_kind(objects, "StatefulSet")["hw-nats"]
    (container,) = servers["spec"]["template"]["spec"]["containers"]
    assert servers["spec"]["replicas"] == 3
    assert {each["containerPort"] for each in container["ports"]} == {4222, 6222, 8222}
    assert of_kind(objects, "Service")["hw-nats"]["spec"]["publishNotReadyAddresses"] is True
    budget = of_kind(objects, "PodDisruptionBudget")["hw-nats"]["spec"]
    assert (budget["maxUnavailable"], budget["unhealthyPodEvictionPolicy"]) == (
        1,
        "IfHealthyBudget",
    )
    policy = of_kind(objects, "NetworkPolicy")["hw-nats"]["spec"]
    to_itself = {"podSelector": policy["podSelector"]}
    assert {"ports": [{"port": 6222}], "from": [to_itself]} in policy["ingress"]
    gateway = of_kind(objects, "Deployment")["hw-gateway"]["spec"]["template"]["spec"]
    assert "--storage-replicas=3" in gateway["containers"][0]["args"]
    for role in ("gateway", "engine"):
        urls = secret_of(objects, f"hw-{role}", "HEADWATER_NATS_URL").split(",")
        assert [url.rpartition("@")[2] for url in urls] == [
            f"hw-nats-{i}.hw-nats:4222" for i in range(3)
        ]


def test_one_server_is_as_it_was_and_two_are_refused() -> None:
    alone, two, theirs = refusals(
        [[{}], [{"nats": {"replicas": 2}}], [THREE | {"access": {"existingSecrets": "ours"}}]]
    )
    assert not isinstance(alone, str)
    assert "hw-nats" not in of_kind(alone[0], "PodDisruptionBudget")
    assert "cluster" not in json.loads(secret_of(alone[0], "hw-nats", "nats.conf"))
    assert "at '/nats/replicas': value must be one of 1, 3, 5" in two
    assert "nats.replicas is 3; allowed with access.existingSecrets: 1, or nats.url" in theirs


async def eventually(work: Callable[[], Awaitable[Any]]) -> Any:
    """The result of work that fails while the servers choose a leader."""
    async with asyncio.timeout(90):
        while True:
            try:
                return await work()
            except (nats.errors.Error, OSError, TimeoutError):
                await asyncio.sleep(0.2)


@pytest.fixture
def cluster(objects: list[Object], tmp_path: Path) -> Iterator[tuple[list[str], list[Any]]]:
    """Addresses of a gateway's user at three servers with the chart's configuration, on loopback,
    and their processes."""
    conf = secret_of(objects, "hw-nats", "nats.conf")
    url = secret_of(objects, "hw-gateway", "HEADWATER_NATS_URL")
    clients = {i: free_port() for i in range(3)}
    routes = {i: free_port() for i in range(3)}
    for i in range(3):
        conf = conf.replace(f"hw-nats-{i}.hw-nats:6222", f"127.0.0.1:{routes[i]}")
        url = url.replace(f"hw-nats-{i}.hw-nats:4222", f"127.0.0.1:{clients[i]}")
    processes = []
    for i in range(3):
        own = json.loads(conf)
        own["cluster"] |= {"port": routes[i], "host": "127.0.0.1"}
        (file := tmp_path / f"{i}.conf").write_text(json.dumps(own))
        flags = ["-js", "-sd", str(tmp_path / f"data-{i}"), "-c", str(file), "-n", f"hw-nats-{i}"]
        flags += ["-a", "127.0.0.1", "-p", str(clients[i])]
        log = (tmp_path / f"{i}.log").open("wb")
        processes.append(
            subprocess.Popen([nats_binary() or "nats-server", *flags], stderr=log, stdout=log)
        )
        log.close()
    try:
        yield url.split(","), processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


async def test_streams_are_kept_by_three_servers_and_outlive_one(
    cluster: tuple[list[str], list[Any]],
) -> None:
    urls, processes = cluster
    client = await nats.connect(urls, connect_timeout=10, max_reconnect_attempts=-1)
    js = client.jetstream(timeout=20)
    await eventually(lambda: js.add_stream(StreamConfig(name=STREAM, subjects=["usage.>"])))
    await eventually(lambda: set_bounds(js, 64 << 20, 3))
    info = await js.stream_info(STREAM)
    num_bytes = (64 << 20) * PERCENT[STREAM] // 100
    assert (info.config.num_replicas, info.config.max_bytes) == (3, num_bytes)
    leader = await eventually(lambda: leader_of(js))
    await eventually(lambda: js.publish("usage.a", b"first"))
    processes[leader].kill()
    await eventually(lambda: js.publish("usage.a", b"second"))
    await eventually(lambda: js.get_msg(STREAM, 2))
    assert (await js.get_msg(STREAM, 1)).data == b"first"
    await client.close()


async def leader_of(js: JetStreamContext) -> int:
    """Number of the server that leads the stream, once the two others have all of it. Raises
    `TimeoutError` before."""
    cluster = (await js.stream_info(STREAM)).cluster
    others = [each for each in (cluster and cluster.replicas) or () if each.current]
    if cluster is None or not cluster.leader or len(others) != 2:
        raise TimeoutError
    return int(cluster.leader[-1])
