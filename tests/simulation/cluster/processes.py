"""A cluster of real processes with faults: the local stack, with relays before engines, output
processors, NATS and Redis. Knows how to start, kill, pause and cut processes; knows nothing about
requests."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from headwater.services.models.demo_model import DEMO_NAME
from headwater.services.runtime import cluster_key
from headwater.services.runtime.kept_child import keeper_command
from headwater.services.runtime.owner_file import own_folder
from headwater.services.runtime.progress import silent
from headwater.services.runtime.tasks import owned_task
from headwater.services.stack.embedded import EmbeddedServer, start_nats, start_valkey
from headwater.services.stack.local_stack import LocalStack
from headwater.services.stack.memory_shares import StartedModel
from headwater.services.stack.plan import StackPlan
from headwater.services.stack.settings import StackSettings
from headwater.services.stack.stage_process import KeptStage, SupervisorPipe
from headwater.services.stack.token_file import key_of_cluster, prepare_token
from tests.simulation.cluster.relay import NatsRelay, Relay

HOST = "127.0.0.1"
ENGINE = "engine"
OUTPUT_PROCESSOR = "output-processor"
PROCESSOR = "processor"
GATEWAY = "gateway"
RELAYED = (ENGINE, OUTPUT_PROCESSOR)
"""Stages that others reach over one connection, which a relay can hold."""
REDIS = "redis"
NATS = "nats"
MAX_MODEL_LEN = 2048
ENVIRONMENT = {
    "HEADWATER_NUM_BLOCKS": "512",
    "HEADWATER_MAX_NUM_SEQS": "32",
    "HEADWATER_MAX_NUM_BATCHED_TOKENS": "512",
    "HEADWATER_SIMULATED_STEP_SECONDS": "0.01",
    "HEADWATER_SIMULATED_PREFILL_SECONDS": "0.0001",
    "HEADWATER_FAIL_OPEN_SHARE": "0.5",
    "HEADWATER_BATCH_CONCURRENCY": "0",
}
"""Variables of every stage: caches that are worth hitting and can be full, steps long enough to be
interrupted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Number of processes of each stage."""

    engines: int = 3
    gateways: int = 2
    processors: int = 2
    output_processors: int = 2

    def names(self, kind: str) -> list[str]:
        numbers = {
            ENGINE: self.engines,
            GATEWAY: self.gateways,
            PROCESSOR: self.processors,
            OUTPUT_PROCESSOR: self.output_processors,
        }
        return [f"{kind}-{i}" for i in range(numbers[kind])]

    def relayed(self) -> list[str]:
        return [name for kind in RELAYED for name in self.names(kind)]


class RelayedStack(LocalStack):
    """The local stack whose stages announce the address of the relay before them."""

    def __init__(
        self, settings: StackSettings, folder: Path, name: str, relays: dict[str, Relay]
    ) -> None:
        super().__init__(settings, [StartedModel.of(folder, name)], report=lambda _: None)
        self._relays = relays

    @property
    def stages(self) -> dict[str, KeptStage]:
        return {stage.name: stage for stage in self._stages()}

    def _stage(
        self,
        name: str,
        module: str,
        flags: Callable[[], list[str]],
        env: dict[str, str] | None = None,
    ) -> KeptStage:
        relay = self._relays.get(name)
        advertised = [] if relay is None else [f"--advertise={relay.address}"]
        kept = super()._stage(name, module, lambda: [*flags(), *advertised], env)
        # Processes that die here were killed; the pauses between restarts are for those that cannot
        # start.
        kept.pauses = kept.PAUSES[:1]
        if relay is not None:
            relay.find = lambda: kept.addresses.get("grpc")
        return kept

    def _gateway_flags(self, plan: StackPlan, idx: int) -> list[str]:
        """Flags of a gateway. Its seeds are the addresses that stages announce."""

        def address(stage: KeptStage) -> str:
            return (
                self._relays[stage.name].address
                if stage.name in self._relays
                else stage.addresses["grpc"]
            )

        known = {
            kind: [address(stage) for stage in group if "grpc" in stage.addresses]
            for kind, group in self._groups.items()
        }
        return plan.gateway(idx, known)


class Server:
    """NATS or Redis behind its relay. After a kill it starts again with the contents of its
    disk."""

    def __init__(self, start: Callable[[], Awaitable[EmbeddedServer]], relay: Relay) -> None:
        self._start = start
        self.relay = relay
        self._server: EmbeddedServer | None = None
        relay.find = lambda: f"{HOST}:{self._server.port}" if self._server is not None else None

    async def start(self) -> None:
        self._server = await self._start()

    @property
    def pid(self) -> int:
        assert self._server is not None
        return self._server.pid

    @property
    def url(self) -> str:
        """Address that does not go through the relay."""
        assert self._server is not None
        return self._server.url

    async def kill(self) -> None:
        """Kills the server; a dead one stays dead."""
        server = self._server
        self._server = None
        if server is not None:
            await server.kill()


class Cluster:
    """Stages and servers. Use within `running`."""

    def __init__(
        self, shape: Shape, folder: Path, stack: RelayedStack, servers: dict[str, Server]
    ) -> None:
        self.shape = shape
        self.folder = folder
        self.servers = servers
        self.relays: dict[str, Relay] = {
            **stack._relays,
            **{name: each.relay for name, each in servers.items()},
        }
        self._stack = stack

    @classmethod
    @contextlib.asynccontextmanager
    async def running(
        cls, shape: Shape, folder: Path, model_folder: Path, *, admin_key: str, log_level: str
    ) -> AsyncIterator[Cluster]:
        """Starts everything in `folder`, where the logs are, and ends it with the scope."""
        os.environ.update(ENVIRONMENT | {"HEADWATER_ADMIN_KEY": admin_key})
        async with contextlib.AsyncExitStack() as life:
            state_dir = folder / "state"
            own_folder(state_dir)
            prepare_token(state_dir, os.environ)
            # Clients of the stages prove themselves as stages do to each other.
            life.enter_context(cluster_key.using(key_of_cluster(state_dir, os.environ)))
            relays = {
                name: await life.enter_async_context(Relay().running()) for name in shape.relayed()
            }
            servers = await _start_servers(folder, life)
            urls = {
                f"{name}_url": f"{name}://{each.relay.address}" for name, each in servers.items()
            }
            settings = _settings(shape, folder, urls["nats_url"], urls["redis_url"], log_level)
            stack = RelayedStack(settings, model_folder, DEMO_NAME, relays)
            # Requests that still run are not awaited.
            stack.hurry.set()
            life.push_async_callback(stack.stop)
            await stack.start(silent)
            await life.enter_async_context(owned_task(stack.run()))
            yield cls(shape, folder, stack, servers)

    @property
    def rest(self) -> str:
        assert self._stack.record is not None
        return self._stack.record.rest

    def names(self, kind: str) -> list[str]:
        return self.shape.names(kind)

    def address(self, name: str, of: str = "grpc") -> str:
        """Address of a stage's last life that does not go through its relay."""
        return self._stack.stages[name].addresses[of]

    def pid(self, name: str) -> int:
        if name in self.servers:
            return self.servers[name].pid
        process = self._stack.stages[name].process
        assert process is not None
        return process.pid

    def pids(self, name: str) -> list[int]:
        """Ids of a process and its children: an engine's core, the server behind its keeper."""
        return [self.pid(name), *_descendants(self.pid(name))]

    @property
    def is_whole(self) -> bool:
        """Whether every process that was started runs."""
        return all(Path(f"/proc/{self.pid(name)}/fd").exists() for name in self._stack.stages)

    def kill(self, name: str) -> None:
        """Kills a stage by SIGKILL; the stack starts it again."""
        _send([self.pid(name)], signal.SIGKILL)

    def kill_core(self, name: str) -> None:
        """Kills the process of an engine that computes."""
        _send(self.pids(name)[1:], signal.SIGKILL)

    def terminate(self, name: str) -> None:
        """Terminates a stage as a roll-out does; the stack starts it again."""
        _send([self.pid(name)], signal.SIGTERM)

    def pause(self, name: str) -> list[int]:
        """Stops a stage; returns the stopped processes for `go_on`."""
        _send(pids := self.pids(name), signal.SIGSTOP)
        return pids

    @staticmethod
    def go_on(pids: list[int]) -> None:
        _send(pids, signal.SIGCONT)


async def _start_servers(folder: Path, life: contextlib.AsyncExitStack) -> dict[str, Server]:
    # Logs of an earlier cluster in the same folder.
    shutil.rmtree(folder / "streams", ignore_errors=True)
    pipe = SupervisorPipe()
    life.callback(pipe.close)
    kept: dict[str, Any] = {
        "launcher": keeper_command(pipe=pipe.watched, limit=2.0),
        "pass_fds": [pipe.watched],
    }
    nats = partial(start_nats, folder / "servers", jetstream=folder / "streams", **kept)
    servers = {
        NATS: Server(nats, await life.enter_async_context(NatsRelay().running())),
        REDIS: Server(
            partial(start_valkey, folder / "servers", **kept),
            await life.enter_async_context(Relay().running()),
        ),
    }
    for server in servers.values():
        await server.start()
        life.push_async_callback(server.kill)
    return servers


def _settings(
    shape: Shape, folder: Path, nats_url: str, redis_url: str, log_level: str
) -> StackSettings:
    return StackSettings(
        device="cpu",
        max_model_len=MAX_MODEL_LEN,
        replicas=shape.engines,
        gateways=shape.gateways,
        processors=shape.processors,
        output_processors=shape.output_processors,
        host=HOST,
        port=0,
        grpc_port=0,
        state_dir=folder / "state",
        nats_url=nats_url,
        redis_url=redis_url,
        executor="simulated",
        log_level=log_level,
    )


def new_admin_key() -> str:
    return secrets.token_urlsafe(24)


def _send(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        # It may have ended, and its next life be on its way.
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _descendants(pid: int) -> list[int]:
    children: list[int] = []
    for tasks in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            children += [int(child) for child in tasks.read_text().split()]
    return [each for child in children for each in [child, *_descendants(child)]]
