"""The whole line on one machine: starts every stage, keeps it running, ends it in order. No orchestrator, no more."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import os
import secrets
import shutil
import socket
import sys
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path

import httpx

from headwater.services.kept_child import keeper_command
from headwater.services.progress import Report
from headwater.services.stack.embedded import EmbeddedServer, start_nats, start_valkey
from headwater.services.stack.line_file import LineRecord, StageRecord, remove_line
from headwater.services.stack.plan import StackPlan
from headwater.services.stack.settings import STACK_VARIABLES, StackSettings
from headwater.services.stack.stage_process import KeptStage, ServerProcess, StageProcess, SupervisorPipe

SERVER_STOP_LIMIT = 4.0
READY_LIMIT = 120.0


class StackError(Exception):
    """The line cannot start, and what to do about it."""


class LocalStack:
    """`start`, then `run` until cancelled, then always `stop`: it leaves no process and no port behind."""

    def __init__(
        self,
        settings: StackSettings,
        model_folder: Path,
        served_name: str,
        *,
        say: Callable[[str], None],
    ) -> None:
        self.settings = settings
        self.hurry = asyncio.Event()
        """Set: whoever still drains is killed."""
        self.record: LineRecord | None = None
        """Since the line is ready."""
        self._model_folder, self._served_name = model_folder, served_name
        self._say = say
        self._pipe = SupervisorPipe()
        self._groups: dict[str, list[KeptStage]] = {}
        """By kind, in the order of starting."""
        self._logs = settings.state_dir / "logs"
        self._env = {name: value for name, value in os.environ.items() if name not in STACK_VARIABLES}

    async def start(self, report: Report) -> None:
        """Returns when a request would be answered. Raises `StackError`, `StageDied` or `EmbeddedServerError`."""
        settings = self.settings
        port = claim_port(settings.host, settings.port, "--port")
        grpc_port = claim_port(settings.host, settings.grpc_port, "--grpc-port")
        shutil.rmtree(self._logs, ignore_errors=True)
        self._logs.mkdir(parents=True)
        nats_url, redis_url = await self._start_servers(report)
        plan = StackPlan(
            settings,
            self._model_folder,
            self._served_name,
            port,
            grpc_port,
            nats_url,
            redis_url,
            master_key=secrets.token_hex(32),
        )
        await self._start_stages(plan, report)
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        self.record = LineRecord(
            pid=os.getpid(),
            model=self._served_name,
            rest=f"http://{host}:{port}",
            grpc=f"{host}:{grpc_port}",
            nats_url=nats_url,
            redis_url=redis_url,
            stages=(),
        )
        await self._wait_until_ready(self.record.rest, report)
        self._write_record()

    async def run(self) -> None:
        """Keeps every process running; ends when cancelled."""
        async with asyncio.TaskGroup() as group:
            for stage in self._stages():
                group.create_task(stage.keep())

    async def stop(self) -> None:
        """Gateways drain first, then what stands behind them ends, all at once, the servers last."""
        remove_line(self.settings.state_dir)
        for wave in (("gateway",), ("output-processor", "processor", "engine"), ("nats", "valkey")):
            limit = SERVER_STOP_LIMIT + (self.settings.drain_limit if wave == ("gateway",) else 0)
            stages = [stage for kind in wave for stage in self._groups.get(kind, ())]
            await asyncio.gather(*(stage.stop(limit, self.hurry) for stage in stages))
        self._pipe.close()

    def _stages(self) -> list[KeptStage]:
        return [stage for group in self._groups.values() for stage in group]

    async def _start_servers(self, report: Report) -> tuple[str, str]:
        """NATS and Valkey of its own, where no outside ones are named; their addresses."""
        settings = self.settings
        if settings.nats_url is None:
            jetstream = settings.state_dir / "nats"
            self._groups["nats"] = [self._server("nats", partial(start_nats, jetstream=jetstream))]
        if settings.redis_url is None:
            self._groups["valkey"] = [self._server("valkey", start_valkey)]
        await _begin(self._stages(), report)
        return (
            settings.nats_url or self._groups["nats"][0].addresses["url"],
            settings.redis_url or self._groups["valkey"][0].addresses["url"],
        )

    async def _start_stages(self, plan: StackPlan, report: Report) -> None:
        """All at once: gateways find the stages behind them by their heartbeats."""
        settings = self.settings
        self._groups["engine"] = [
            self._stage(f"engine-{i}", "headwater.services.engine", partial(plan.engine, i), plan.engine_env(i))
            for i in range(settings.replicas)
        ]
        self._groups["processor"] = [
            self._stage(f"processor-{i}", "headwater.services.processor", partial(plan.processor, i))
            for i in range(settings.processors)
        ]
        self._groups["output-processor"] = [
            self._stage(
                f"output-processor-{i}", "headwater.services.output_processor", partial(plan.output_processor, i)
            )
            for i in range(settings.output_processors)
        ]
        self._groups["gateway"] = [
            self._stage(f"gateway-{i}", "headwater.gateway", partial(self._gateway_flags, plan, i), plan.gateway_env())
            for i in range(settings.gateways)
        ]
        kinds = ("engine", "processor", "output-processor", "gateway")
        await _begin([stage for kind in kinds for stage in self._groups[kind]], report)

    def _stage(
        self, name: str, module: str, flags: Callable[[], list[str]], env: dict[str, str] | None = None
    ) -> KeptStage:
        async def start() -> StageProcess:
            command = [sys.executable, "-m", module, *flags()]
            log, env_of_stage = self._logs / f"{name}.log", self._env | (env or {})
            return await StageProcess.start(name, command, log=log, supervisor=self._pipe, env=env_of_stage)

        return KeptStage(name, start, self._changed)

    def _server(self, name: str, start_server: Callable[..., Awaitable[EmbeddedServer]]) -> KeptStage:
        """Comes back on the port that it had, so that every client finds it again."""

        async def start() -> ServerProcess:
            launcher = keeper_command(pipe=self._pipe.watched, limit=SERVER_STOP_LIMIT)
            port = int(kept.addresses.get("port", 0))
            server = await start_server(folder=self._logs, port=port, launcher=launcher, pass_fds=[self._pipe.watched])
            return ServerProcess(server)

        kept = KeptStage(name, start, self._changed)
        return kept

    def _gateway_flags(self, plan: StackPlan, idx: int) -> list[str]:
        """With the gRPC addresses of the stages that have been ready: a restarted gateway finds them without NATS."""
        known = {
            kind: [stage.addresses["grpc"] for stage in group if "grpc" in stage.addresses]
            for kind, group in self._groups.items()
        }
        return plan.gateway(idx, known)

    async def _wait_until_ready(self, rest: str, report: Report) -> None:
        """A gateway's /ready speaks for the line: it knows a processor, an output processor and an engine."""
        what = "joining the stages"
        report(what, 0, 1)
        async with httpx.AsyncClient(base_url=rest, timeout=5) as client:
            try:
                async with asyncio.timeout(READY_LIMIT):
                    while (await client.get("/ready")).status_code != httpx.codes.OK:  # noqa: ASYNC110 (another process)
                        await asyncio.sleep(0.05)
            except TimeoutError:
                raise StackError(f"the line is not ready after {READY_LIMIT:.0f} s; logs: {self._logs}") from None
        report(what, 1, 1)

    def _changed(self, what: str) -> None:
        """A process died or came back after the line was ready."""
        if self.record is not None:
            self._say(what)
            self._write_record()

    def _write_record(self) -> None:
        assert self.record is not None
        stages = tuple(
            StageRecord(name=stage.name, pid=stage.process.pid, addresses=dict(stage.addresses))
            for stage in self._stages()
            if stage.process is not None
        )
        self.record = dataclasses.replace(self.record, stages=stages)
        self.record.write(self.settings.state_dir)


async def _begin(stages: Sequence[KeptStage], report: Report) -> None:
    """Waits until all are ready; the first that dies ends the waiting."""
    num_ready = 0
    what = "starting " + ", ".join(dict.fromkeys(stage.name.rstrip("-0123456789") for stage in stages))

    async def begin(stage: KeptStage) -> None:
        nonlocal num_ready
        await stage.begin()
        num_ready += 1
        report(what, num_ready, len(stages))

    report(what, 0, len(stages))
    tasks = [asyncio.ensure_future(begin(stage)) for stage in stages]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def claim_port(host: str, port: int, flag: str) -> int:
    """`port`, or a free one for 0. Raises `StackError` when somebody listens there."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise StackError(f"cannot listen on {host}:{port}: {error.strerror}") from None
            raise StackError(f"port {port} on {host} is in use; choose another with {flag}") from None
        return int(probe.getsockname()[1])
