"""Valkey with replicas and Sentinels: as the chart renders them, and what it renders at work."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import platform
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headwater.services.runtime.redis_client import redis_client
from headwater.services.runtime.store import Store, StoreUnavailable
from headwater.services.stack.embedded import valkey_binary
from tests.deploy.chart import applied, of_kind, refusals
from tests.deploy.kube_api import Object
from tests.deploy.test_chart import OF_OTHERS

# Where it is built for, a library that does not load is an error.
if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
    pytest.skip("Helm's library is built for Linux on x86-64", allow_module_level=True)

pytestmark = pytest.mark.long
THREE: dict[str, Any] = {"valkey": {"replicas": 3}}
HOSTS = [f"hw-valkey-{number}.hw-valkey" for number in range(3)]
CLIENT = f"""#!{sys.executable}
# Prints an answer as valkey-cli does into a pipe: valkey-cli -h HOST -p PORT WORD…
import os, redis, sys
_, _, host, _, port, *words = sys.argv
client = redis.Redis(host, int(port), password=os.environ["REDISCLI_AUTH"], decode_responses=True)
print(*client.execute_command(*words), sep="\\n")
"""
SECONDS = 90


@pytest.fixture(scope="module")
def objects() -> list[Object]:
    ((found,),) = applied([[THREE]])
    return found


def secret_of(objects: list[Object], name: str) -> dict[str, str]:
    data = of_kind(objects, "Secret")[name]["data"]
    return {key: base64.b64decode(value).decode() for key, value in data.items()}


def test_three_servers_have_sentinels_and_go_one_at_a_time(objects: list[Object]) -> None:
    import kubernetes_validate  # noqa: PLC0415 (two seconds of every worker)

    for each in objects:
        if each["kind"] not in OF_OTHERS:
            kubernetes_validate.validate(each, "1.34", strict=True)
    servers = of_kind(objects, "StatefulSet")["hw-valkey"]
    containers = servers["spec"]["template"]["spec"]["containers"]
    assert servers["spec"]["replicas"] == 3
    assert [each["ports"][0]["containerPort"] for each in containers] == [6379, 26379]
    budget = of_kind(objects, "PodDisruptionBudget")["hw-valkey"]["spec"]
    assert (budget["maxUnavailable"], budget["unhealthyPodEvictionPolicy"]) == (
        1,
        "IfHealthyBudget",
    )
    policies = of_kind(objects, "NetworkPolicy")
    ports = [{"port": 6379}, {"port": 26379}]
    to_servers = {"podSelector": policies["hw-valkey"]["spec"]["podSelector"]}
    assert {"ports": ports, "from": [to_servers]} in policies["hw-valkey"]["spec"]["ingress"]
    for role in ("gateway", "engine"):
        assert {"ports": ports, "to": [to_servers]} in policies[f"hw-{role}"]["spec"]["egress"]
        url = secret_of(objects, f"hw-{role}")["HEADWATER_REDIS_URL"]
        assert url.startswith(f"redis+sentinel://{role}:")
        assert all(f"{host}:26379" in url for host in HOSTS)


def test_one_server_is_as_it_was_and_two_are_refused() -> None:
    alone, two, theirs = refusals(
        [[{}], [{"valkey": {"replicas": 2}}], [THREE | {"access": {"existingSecrets": "ours"}}]]
    )
    assert not isinstance(alone, str)
    assert "hw-valkey" not in of_kind(alone[0], "PodDisruptionBudget")
    assert secret_of(alone[0], "hw-valkey").keys() == {"users.acl"}
    assert secret_of(alone[0], "hw-gateway")["HEADWATER_REDIS_URL"].startswith("redis://gateway:")
    assert "at '/valkey/replicas': value must be one of 1, 3, 5" in two
    assert "valkey.replicas is 3; allowed with access.existingSecrets: 1, or valkey.url" in theirs


class Pods:
    """The chart's Valkey pods as processes, each with an address of its own on loopback."""

    def __init__(self, objects: list[Object], folder: Path, kept: dict[str, Any]) -> None:
        spec = of_kind(objects, "StatefulSet")["hw-valkey"]["spec"]["template"]["spec"]
        self._containers = spec["containers"]
        self._folder = folder
        self._kept = kept
        self._running: dict[tuple[int, str], subprocess.Popen[bytes]] = {}
        self._addresses = [f"127.{2 + os.getpid() % 250}.254.{number + 1}" for number in range(3)]
        self.url = self._here(secret_of(objects, "hw-gateway")["HEADWATER_REDIS_URL"])
        (folder / "access").mkdir()
        for name, text in secret_of(objects, "hw-valkey").items():
            (folder / "access" / name).write_text(text)
        (folder / "bin").mkdir()
        (folder / "bin/valkey-server").symlink_to(valkey_binary() or "")
        (folder / "bin/valkey-cli").write_text(CLIENT)
        (folder / "bin/valkey-cli").chmod(0o755)

    def _here(self, text: str) -> str:
        for host, address in zip(HOSTS, self._addresses, strict=True):
            text = text.replace(host, address)
        return text

    def start(self, number: int) -> None:
        """A pod whose volume is empty."""
        data = self._folder / f"data-{number}"
        shutil.rmtree(data, ignore_errors=True)
        data.mkdir()
        own = {"POD_IP": self._addresses[number], "POD_NAME": f"hw-valkey-{number}"}
        access = self._folder / f"access-{number}"
        if not access.exists():
            shutil.copytree(self._folder / "access", access)
            script = access / "valkey.sh"
            text = script.read_text().replace("/access/", f"{access}/")
            script.write_text(text.replace("/data/", f"{data}/"))
        for container in self._containers:
            env = {"PATH": f"{self._folder / 'bin'}:{os.environ['PATH']}"} | own
            for each in container["env"]:
                if "value" in each:
                    env[each["name"]] = self._here(self._filled(each["value"], own))
            words = [
                self._filled(each, own)
                .replace("/access/", f"{access}/")
                .replace("/data", str(data))
                for each in (*container["command"], *container["args"])
            ]
            with (self._folder / f"{container['name']}-{number}.log").open("ab") as log:
                self._running[number, container["name"]] = subprocess.Popen(
                    [*self._kept["launcher"], *words],
                    env=env,
                    stdout=log,
                    stderr=log,
                    pass_fds=self._kept["pass_fds"],
                    start_new_session=True,
                )

    @staticmethod
    def _filled(text: str, own: dict[str, str]) -> str:
        for name, value in own.items():
            text = text.replace(f"$({name})", value)
        return text

    def kill(self, number: int) -> None:
        for name in ("valkey", "sentinel"):
            process = self._running.pop((number, name))
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    async def primary(self) -> int:
        """Number of the pod that the Sentinels name."""
        sentinels = redis_client(self.url).connection_pool.sentinel_manager
        address, _ = await sentinels.discover_master("headwater")
        await sentinels.aclose()
        return self._addresses.index(address)

    def close(self) -> None:
        for number in {number for number, _ in self._running}:
            self.kill(number)

    def logs(self) -> str:
        return "\n".join(
            f"{path.name}:\n{path.read_text()[-2000:]}"
            for path in sorted(self._folder.glob("*.log"))
        )


@pytest.fixture
def pods(objects: list[Object], tmp_path: Path, kept: dict[str, Any]) -> Iterator[Pods]:
    with contextlib.closing(Pods(objects, tmp_path, kept)) as made:
        yield made
        print(made.logs())


async def until_holds(store: Store, *words: Any, answer: Any) -> None:
    """Waits until the command has the answer."""
    async with asyncio.timeout(SECONDS):
        while True:
            with contextlib.suppress(StoreUnavailable):
                if (printed := await store.command(*words)) == answer:
                    return
                print(words, printed)
            await asyncio.sleep(0.2)


async def test_the_store_outlives_primaries_whose_pods_come_back_empty_at_once(
    pods: Pods,
) -> None:
    for number in range(3):
        pods.start(number)
    async with Store.open(pods.url) as store:
        await until_holds(store, "SET", "index", "kept", answer=True)
        for _ in range(2):
            async with asyncio.timeout(SECONDS):
                while await num_replicas(store) < 2:  # noqa: ASYNC110 (other processes)
                    await asyncio.sleep(0.2)
            primary = await pods.primary()
            pods.kill(primary)
            pods.start(primary)
            await until_holds(store, "GET", "index", answer=b"kept")
            assert await pods.primary() != primary


async def num_replicas(store: Store) -> int:
    with contextlib.suppress(StoreUnavailable):
        info = await store.command("INFO", "replication")
        return sum(
            each.get("state") == "online" for key, each in info.items() if key.startswith("slave")
        )
    return 0
