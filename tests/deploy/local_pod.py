"""One pod, run as Kubernetes runs it: init containers, the container, its probes, restarts, and the
end of it."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import httpx
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.deploy.kube_api import Object
from tests.deploy.launcher import KILL, TERM, Launcher, Running

LOOK_SECONDS = 0.03
MAX_BACKOFF = 5.0


@dataclass(eq=False)
class LocalPod:
    """Its fields are what a cluster reads; `run` is its life."""

    name: str
    spec: Object
    labels: Mapping[str, str]
    address: str
    node: str
    launcher: Launcher
    secrets: Mapping[str, Object]
    folder: Path
    claims: Path
    owner: str = ""
    template: str = ""
    """Names the version of its template."""
    ready: bool = False
    succeeded: bool = False
    failed: bool = False
    num_restarts: int = 0
    terminating_since: float | None = None
    was_killed: bool = False
    """Its time to end was over before it had ended."""
    _stop: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_terminating(self) -> bool:
        return self.terminating_since is not None

    def terminate(self) -> None:
        if not self.is_terminating:
            self.terminating_since = time.monotonic()
            self._stop.set()

    async def run(self) -> None:
        """From the first init container to the last word."""
        for container in self.spec.get("initContainers", []):
            if not await self._run_to_end(container):
                return
        (container,) = self.spec["containers"]
        restarts = self.spec.get("restartPolicy", "Always")
        while not self._stop.is_set():
            status = await self._run_container(container)
            if self._stop.is_set():
                return
            self.succeeded = status == 0
            self.failed = status != 0
            if restarts == "OnFailure" and status == 0:
                return
            self.num_restarts += 1
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(0.1 * 2**self.num_restarts, MAX_BACKOFF)):
                    await self._stop.wait()

    async def _run_to_end(self, container: Object) -> bool:
        running = await self._start(container, [*container["command"], *container.get("args", [])])
        while running.status() is None:
            if self._stop.is_set():
                running.signal(KILL)
            await asyncio.sleep(LOOK_SECONDS)
        return running.status() == 0

    async def _run_container(self, container: Object) -> int:
        running = await self._start(container, [*container["command"], *container.get("args", [])])
        probes = asyncio.create_task(self._probe(container, running))
        stopping = asyncio.create_task(self._stop.wait())
        try:
            while (status := running.status()) is None and not stopping.done():  # noqa: ASYNC110 (another process)
                await asyncio.sleep(LOOK_SECONDS)
            if status is None:
                status = await self._end(container, running)
            return status
        finally:
            self.ready = False
            for task in (probes, stopping):
                task.cancel()
            await asyncio.gather(probes, stopping, return_exceptions=True)

    async def _end(self, container: Object, running: Running) -> int:
        """preStop, SIGTERM, and SIGKILL when the time is over that both of them share."""
        until = time.monotonic() + self.spec["terminationGracePeriodSeconds"]
        if (hook := container.get("lifecycle", {}).get("preStop")) is not None:
            await self._exec(container, running, hook["exec"]["command"])
        running.signal(TERM)
        while (status := running.status()) is None:
            if time.monotonic() > until:
                self.was_killed = True
                running.signal(KILL)
            await asyncio.sleep(LOOK_SECONDS)
        return status

    async def _probe(self, container: Object, running: Running) -> None:
        if (probe := container.get("startupProbe")) is not None:
            await self._until_failed(container, probe, running, until_served=True)
        live = container.get("livenessProbe")
        async with asyncio.TaskGroup() as group:
            if live is not None:
                group.create_task(self._until_failed(container, live, running))
            group.create_task(self._look_ready(container, running))

    async def _until_failed(
        self, container: Object, probe: Object, running: Running, *, until_served: bool = False
    ) -> None:
        """Ends the container after as many failures as the probe allows; a pod that ends is not
        asked."""
        num_failures = 0
        while not self.is_terminating:
            num_failures = (
                0 if (serves := await self._asks(container, running, probe)) else num_failures + 1
            )
            if serves and until_served:
                return
            if num_failures >= probe.get("failureThreshold", 3):
                running.signal(KILL)
                return
            await asyncio.sleep(probe.get("periodSeconds", 10))

    async def _look_ready(self, container: Object, running: Running) -> None:
        if (probe := container.get("readinessProbe")) is None:
            self.ready = True
            return
        num_failures = 0
        while True:
            if await self._asks(container, running, probe):
                self.ready = True
                num_failures = 0
            elif (num_failures := num_failures + 1) >= probe.get("failureThreshold", 3):
                self.ready = False
            await asyncio.sleep(probe.get("periodSeconds", 10))

    async def _asks(self, container: Object, running: Running, probe: Object) -> bool:
        kinds: dict[str, Callable[[Object], Awaitable[bool]]] = {
            "httpGet": self._http_get,
            "grpc": self._grpc_check,
            "tcpSocket": self._connects,
        }
        with contextlib.suppress(TimeoutError, OSError, httpx.HTTPError, grpc.aio.AioRpcError):
            async with asyncio.timeout(probe.get("timeoutSeconds", 1)):
                if "exec" in probe:
                    return await self._exec(container, running, probe["exec"]["command"]) == 0
                (kind,) = kinds.keys() & probe.keys()
                return await kinds[kind](probe[kind])
        return False

    async def _http_get(self, action: Object) -> bool:
        url = f"{action.get('scheme', 'HTTP').lower()}://{self.address}:{action['port']}{action['path']}"
        async with httpx.AsyncClient(verify=False) as client:
            return (await client.get(url)).is_success

    async def _grpc_check(self, action: Object) -> bool:
        async with grpc.aio.insecure_channel(f"{self.address}:{action['port']}") as channel:
            request = health_pb2.HealthCheckRequest(service=action.get("service", ""))
            reply = await health_pb2_grpc.HealthStub(channel).Check(request)
        return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)

    async def _connects(self, action: Object) -> bool:
        _, writer = await asyncio.open_connection(self.address, action["port"])
        writer.close()
        return True

    async def _exec(self, container: Object, running: Running, command: list[str]) -> int:
        executed = await self._start(container, command, running)
        try:
            while (status := executed.status()) is None:  # noqa: ASYNC110 (another process)
                await asyncio.sleep(LOOK_SECONDS)
            return status
        finally:
            executed.signal(KILL)

    async def _start(
        self, container: Object, command: list[str], within: Running | None = None
    ) -> Running:
        env = self._environment(container)
        command = [
            re.sub(r"\$\((\w+)\)", lambda found: env.get(found[1], found[0]), each)
            for each in command
        ]
        name = f"{self.name}/{container['name']}"
        mounts = self._mounts(container)
        return await self.launcher.start(name, command, env, mounts, container, within)

    def _environment(self, container: Object) -> dict[str, str]:
        facts = {"status.podIP": self.address, "metadata.name": self.name}
        env: dict[str, str] = {}
        for source in container.get("envFrom", []):
            env |= _texts(self.secrets[source["secretRef"]["name"]])
        for each in container.get("env", []):
            env[each["name"]] = (
                each["value"]
                if "value" in each
                else facts[each["valueFrom"]["fieldRef"]["fieldPath"]]
            )
        if env.get("HEADWATER_HOST") == "::":
            # Pods share this machine's network, so a server may listen only at its pod's own
            # address.
            env["HEADWATER_HOST"] = self.address
        return env

    def _mounts(self, container: Object) -> dict[str, Path]:
        volumes = {each["name"]: each for each in self.spec.get("volumes", [])}
        mounts = {}
        for mount in container.get("volumeMounts", []):
            folder = self._volume(volumes[mount["name"]]) / mount.get("subPath", "")
            folder.mkdir(parents=True, exist_ok=True)
            mounts[mount["mountPath"]] = folder
        return mounts

    def _volume(self, volume: Object) -> Path:
        if "persistentVolumeClaim" in volume:
            return self.claims / volume["persistentVolumeClaim"]["claimName"]
        folder = self.folder / volume["name"]
        if "secret" in volume:
            folder.mkdir(parents=True, exist_ok=True)
            for name, text in _texts(self.secrets[volume["secret"]["secretName"]]).items():
                (folder / name).write_text(text)
                (folder / name).chmod(volume["secret"]["defaultMode"])
        return folder


def _texts(secret: Object) -> dict[str, str]:
    return {name: base64.b64decode(value).decode() for name, value in secret["data"].items()}
