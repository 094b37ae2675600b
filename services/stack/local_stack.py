"""The whole cluster on one machine: starts every stage, keeps it running, ends it in order. It is
no orchestrator."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import os
import shutil
import ssl
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

import httpx

from ..runtime.bus import Bus
from ..runtime.cluster_key import using
from ..runtime.hardware import least_gpu_memory, resolve_device, visible_gpus
from ..runtime.kept_child import keeper_command
from ..runtime.owner_file import own_folder
from ..runtime.progress import Report
from ..runtime.tasks import owned_task
from ..runtime.tls import own_gateway_context
from . import engine_calls
from .access import ACL_FILE, MASTER_KEY_FILE, NATS_FILE, Passwords, ServerAccess, keep_master_key
from .cluster_record import ClusterRecord, StageRecord, remove_cluster
from .embedded import STREAMS_FOLDER, EmbeddedServer, start_nats, start_valkey
from .failed_writes import restart_after_failed_writes
from .fork_servers import NO_FORKS, ForkServers
from .held_port import HeldPort, check_free
from .log_files import keep_bounded, put_all_aside
from .memory_shares import StartedModel, memory_shares, start_order
from .model_manager import ModelManager
from .model_stages import ENGINE_MODULE, PROCESSOR_MODULE, ModelStages
from .plan import StackPlan
from .readiness import until_ready
from .roles import Role
from .settings import STACK_VARIABLES, StackSettings
from .settings_beside import left_out, without_caches
from .stack_error import StackError
from .stage_process import (
    KeptStage,
    ServerProcess,
    StageProcess,
    StageProgram,
    SupervisorPipe,
    begin_all,
)
from .supervisor_facts import SupervisorFacts
from .token_file import (
    TOKEN,
    TOKEN_PATH,
    key_of_cluster,
    prepare_token,
    tenants_are_signed,
    token_env,
)
from .weights_holder import WeightsHolder, holds_weights

SERVER_STOP_LIMIT = 4.0
ACCESS_FOLDER = "access"
"""Folder in the state folder: who may use this cluster's servers."""
READY_LIMIT = 120.0


class LocalStack:
    """`start`, then `run` until cancelled, then always `stop`: it leaves no process and no port
    behind."""

    def __init__(
        self,
        settings: StackSettings,
        models: Sequence[StartedModel],
        *,
        report: Callable[[str], None],
        forks: ForkServers = NO_FORKS,
    ) -> None:
        self.settings = settings
        self.hurry = asyncio.Event()
        """Set when stages that still drain are to be killed."""
        self.record: ClusterRecord | None = None
        """Record of the cluster; None until it is ready."""
        self._models = models
        self._report = report
        self._forks = forks
        self._pipe = SupervisorPipe()
        self._servers: dict[str, KeptStage] = {}
        self._gateways: list[KeptStage] = []
        self._held: list[HeldPort] = []
        self._manager = ModelManager(
            settings, self._pipe, self._stage, hurry=self.hurry, report=self._report_and_record
        )
        self._logs = settings.state_dir / "logs"
        self._env = {
            name: value for name, value in os.environ.items() if name not in STACK_VARIABLES
        }
        self._env |= token_env(settings.state_dir, self._env)

    async def start(self, report: Report) -> None:
        """Returns when a request would be answered. Raises `StackError`, `StageDied` or
        `EmbeddedServerError`."""
        settings = self.settings
        self._forks.read_tokenizers(model.folder for model in self._models)
        port = self._claim(settings.port, "--port")
        grpc_port = self._claim(settings.grpc_port, "--grpc-port")
        own_folder(self._logs)
        put_all_aside(self._logs, settings.earlier_logs)
        prepare_token(settings.state_dir, os.environ)
        keep_master_key(settings.state_dir / MASTER_KEY_FILE)
        servers = await self._start_servers(report)
        shares = self._memory_shares()
        first = self._models[0]
        has_others = len(self._models) > 1
        own = settings if first.has_cache or not has_others else without_caches(settings)
        plan = StackPlan(
            dataclasses.replace(own, **_share(shares, first)),
            first.folder,
            first.name,
            port,
            grpc_port,
            servers,
        )
        for model in self._models if has_others else ():
            if sentence := left_out(settings, model):
                self._report(sentence)
        await self._start_stages(plan, shares, report)
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        self.record = ClusterRecord(
            pid=os.getpid(),
            model=first.name,
            rest=f"{'https' if settings.tls_cert_file else 'http'}://{host}:{port}",
            grpc=f"{host}:{grpc_port}",
            nats_url=servers.nats(Role.OPERATOR),
            redis_url=servers.redis(Role.OPERATOR),
            stages=(),
        )
        await self._wait_until_ready(self.record.rest, report)
        if settings.has_admins:
            tenants_are_signed(settings.state_dir)
        self._write_record()

    async def run(self) -> None:
        """Keeps every process running, starts and stops replicas, loads and unloads models; ends
        when cancelled."""
        assert self.record is not None
        with using(key_of_cluster(self.settings.state_dir, self._env)):
            async with Bus.open(self.record.nats_url) as bus, asyncio.TaskGroup() as tasks:
                for stage in [*self._servers.values(), *self._gateways]:
                    stage.guard(tasks)
                if (nats := self._servers.get("nats")) is not None:
                    log = self._logs / f"{nats.name}.log"
                    streams = self.settings.state_dir / STREAMS_FOLDER
                    tasks.create_task(restart_after_failed_writes(nats, log, streams, self._report))
                facts = SupervisorFacts(self.settings, os.environ)
                async with (
                    owned_task(keep_bounded(self._logs, self.settings.earlier_logs)),
                    owned_task(facts.answer(bus, self._manager.supervisor_id)),
                ):
                    await self._manager.run(bus, tasks)

    async def stop(self) -> None:
        """Gateways drain first, then what stands after them ends, all at once, the servers
        last."""
        remove_cluster(self.settings.state_dir)
        await self._end(self._gateways, SERVER_STOP_LIMIT + self.settings.drain_limit)
        await self._end(
            [stage for model in self._manager.table.all() for stage in model.stages()],
            SERVER_STOP_LIMIT,
        )
        await self._end(list(self._servers.values()), SERVER_STOP_LIMIT)
        # Passwords of servers that are gone.
        shutil.rmtree(self.settings.state_dir / ACCESS_FOLDER, ignore_errors=True)
        for held in self._held:
            held.close()
        self._pipe.close()

    def _claim(self, port: int, flag: str) -> int:
        host = self.settings.host
        try:
            if not self.settings.shares_ports:
                check_free(host, port)
                return port
            self._held.append(held := HeldPort(host, port))
            return held.port
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise StackError(f"cannot listen on {host}:{port}: {error.strerror}") from None
            raise StackError(
                f"port {port} on {host} is in use; choose another with {flag}"
            ) from None

    async def _end(self, stages: Sequence[KeptStage], limit: float) -> None:
        await asyncio.gather(*(stage.stop(limit, self.hurry) for stage in stages))

    @property
    def _groups(self) -> dict[str, list[KeptStage]]:
        """Stages by kind, in the order of starting."""
        models = self._manager.table.all()
        return {
            **{name: [server] for name, server in self._servers.items()},
            "engine": [stage for model in models for stage in model.engines.values()],
            "processor": [stage for model in models for stage in model.processors],
            "output-processor": [stage for model in models for stage in model.output_processors],
            "gateway": self._gateways,
        }

    def _stages(self) -> list[KeptStage]:
        return [stage for group in self._groups.values() for stage in group]

    async def _start_servers(self, report: Report) -> ServerAccess:
        """NATS and Valkey of its own, where no outside ones are named, with passwords for this life
        of the cluster."""
        settings = self.settings
        folder = self.settings.state_dir / ACCESS_FOLDER
        passwords = Passwords.new()
        passwords.write_servers(folder)
        if settings.nats_url is None:
            start = partial(
                start_nats, jetstream=settings.state_dir / STREAMS_FOLDER, config=folder / NATS_FILE
            )
            self._servers["nats"] = self._server("nats", start)
        if settings.redis_url is None:
            self._servers["valkey"] = self._server(
                "valkey", partial(start_valkey, acl=folder / ACL_FILE)
            )
        await begin_all(list(self._servers.values()), report)
        servers = ServerAccess(
            settings.nats_url or self._servers["nats"].addresses["url"],
            settings.redis_url or self._servers["valkey"].addresses["url"],
            passwords if settings.nats_url is None else None,
            passwords if settings.redis_url is None else None,
        )
        # Stages that somebody starts by hand read this file.
        servers.write_stages(
            folder, {name: self._env[name] for name in (TOKEN, TOKEN_PATH) if self._env.get(name)}
        )
        return servers

    def _memory_shares(self) -> dict[str, float]:
        """Share of a GPU that a model gets where several are on it, by model; empty: each has a GPU
        of its own, or the memory of GPUs is not known. Raises `StackError` where they do not
        fit."""
        settings = self.settings
        total = least_gpu_memory()
        num_engines = len(self._models) - 1 + settings.rules.max_replicas
        num_places = len(visible_gpus()) // settings.num_ranks
        is_alone = len(self._models) == 1 or num_engines <= num_places
        if resolve_device(settings.device) != "cuda" or is_alone or not total:
            return {}
        if settings.resident_bytes:
            # Each starts while the others sleep.
            share = min(settings.gpu_memory_utilization, settings.resident_bytes / total)
            return {model.name: round(share, 4) for model in self._models}
        return memory_shares(self._models, total, settings.gpu_memory_utilization)

    async def _start_stages(
        self, plan: StackPlan, shares: Mapping[str, float], report: Report
    ) -> None:
        """Starts all stages at once: gateways find the stages behind them by heartbeats. Models
        that divide a GPU's memory start one after another."""
        first = self._manager.table.first(plan)
        models = {first.name: first}
        for each in self._models[1:]:
            models[each.name] = self._manager.table.beside(each, **_share(shares, each))
        self._gateways = [
            self._stage(
                f"gateway-{i}",
                "headwater.gateway",
                partial(self._gateway_flags, plan, i),
                plan.gateway_env(),
            )
            for i in range(self.settings.gateways)
        ]
        if self.settings.resident_bytes:
            await self._start_in_turn(list(models.values()), report)
            await begin_all(self._gateways, report)
        elif shares:
            order = [models[each.name] for each in start_order(self._models)]
            await begin_all([*order[0].stages(), *self._gateways], report)
            for model in order[1:]:
                await begin_all(model.stages(), report)
        else:
            stages = [stage for model in models.values() for stage in model.stages()]
            await begin_all([*stages, *self._gateways], report)
        for model in models.values():
            self._manager.table.serve(model)

    async def _start_in_turn(self, models: Sequence[ModelStages], report: Report) -> None:
        """Starts models one after another, each while the others sleep; the first one stays awake.
        Raises `StackError` for one that is larger than what awake models may have."""
        most = self.settings.resident_bytes
        with using(key_of_cluster(self.settings.state_dir, self._env)):
            for model in [*models[1:], models[0]]:
                await begin_all(model.stages(), report)
                [engine] = model.engines.values()
                address = engine.addresses["grpc"]
                try:
                    load = (await engine_calls.described(address)).load
                    num_bytes = 0 if load is None else load.num_releasable_bytes
                    if num_bytes > most:
                        raise StackError(
                            f"{model.name} takes {num_bytes / 1e9:.4g} GB, --resident gives awake "
                            f"models {most / 1e9:.4g} GB"
                        )
                    if model is not models[0]:
                        await engine_calls.sleep(address)
                except engine_calls.EngineCallFailed as failed:
                    raise StackError(f"{model.name} cannot take turns: {failed}") from None

    def _stage(
        self,
        name: str,
        module: str,
        flags: Callable[[], list[str]],
        env: dict[str, str] | None = None,
    ) -> KeptStage:
        holder = None
        if module == ENGINE_MODULE and holds_weights(self.settings):
            holder = WeightsHolder(self._forks.stages)

        async def start() -> StageProcess:
            program = StageProgram(module, flags(), self._env | (env or {}))
            if module == ENGINE_MODULE:
                program = self._forks.for_cores_of(program)
            elif module == PROCESSOR_MODULE:
                program = self._forks.for_checks_of(program)
            if holder is not None:
                program = await holder.known_to(program)
            log = self._logs / f"{name}.log"
            forks = self._forks.stages
            return await StageProcess.start(
                name, program, log=log, supervisor=self._pipe, forks=forks
            )

        stopped = None if holder is None else holder.stop
        return KeptStage(name, start, self._report_and_record, stopped)

    def _server(
        self, name: str, start_server: Callable[..., Awaitable[EmbeddedServer]]
    ) -> KeptStage:
        """Comes back on the port that it had, so that every client finds it again."""

        async def start() -> ServerProcess:
            launcher = keeper_command(pipe=self._pipe.watched, limit=SERVER_STOP_LIMIT)
            port = int(kept.addresses.get("port", 0))
            server = await start_server(
                folder=self._logs, port=port, launcher=launcher, pass_fds=[self._pipe.watched]
            )
            return ServerProcess(server)

        kept = KeptStage(name, start, self._report_and_record)
        return kept

    def _gateway_flags(self, plan: StackPlan, idx: int) -> list[str]:
        """Flags of a gateway, with the gRPC addresses of the stages that have been ready: a
        restarted gateway finds them without NATS."""
        known = {
            kind: [stage.addresses["grpc"] for stage in group if "grpc" in stage.addresses]
            for kind, group in self._groups.items()
        }
        if len(self._manager.table.all()) > 1:
            # An address does not name the model of an output processor; its heartbeats do.
            del known["output-processor"]
        return plan.gateway(idx, known)

    async def _wait_until_ready(self, rest: str, report: Report) -> None:
        """A gateway's /ready speaks for the cluster: it knows a processor, an output processor and
        an engine."""
        what = "joining the stages"
        report(what, 0, 1)
        settings = self.settings
        # Plain HTTP has no certificates: to read those of all authorities takes 25 ms.
        verify: ssl.SSLContext | bool = settings.tls_cert_file is not None
        if settings.tls_cert_file is not None and settings.tls_key_file is not None:
            verify = own_gateway_context(settings.tls_cert_file, settings.tls_key_file)
        async with httpx.AsyncClient(base_url=rest, timeout=5, verify=verify) as client:
            try:
                async with asyncio.timeout(READY_LIMIT):
                    await until_ready(
                        client,
                        {"NATS": settings.nats_url, "Redis": settings.redis_url},
                        self._report,
                    )
            except httpx.TransportError as refusal:
                if settings.tls_client_ca_file is None:
                    raise StackError(
                        f"the gateway does not answer: {refusal}; logs: {self._logs}"
                    ) from None
                self._report(
                    "the gateway's own certificate is none of a client: whether the cluster is "
                    "ready is unknown"
                )
            except TimeoutError:
                raise StackError(
                    f"the cluster is not ready after {READY_LIMIT:.0f} s; logs: {self._logs}"
                ) from None
        report(what, 1, 1)

    def _report_and_record(self, what: str) -> None:
        """A process died, came or left, or a model did, after the cluster was ready."""
        if self.record is not None:
            self._report(what)
            try:
                self._write_record()
            except OSError as fault:
                # An error such as a full disk must not end running processes, or leave dead ones
                # unrestarted.
                self._report(f"the cluster's record is out of date: {fault}")

    def _write_record(self) -> None:
        assert self.record is not None
        stages = tuple(
            StageRecord(
                name=stage.name,
                pid=process.pid,
                addresses=dict(stage.addresses),
                children=process.children,
            )
            for stage in self._stages()
            if (process := stage.process) is not None
        )
        self.record = dataclasses.replace(self.record, stages=stages)
        self.record.write(self.settings.state_dir)


def _share(shares: Mapping[str, float], model: StartedModel) -> dict[str, Any]:
    """The setting by which a model has its share."""
    return {"gpu_memory_utilization": shares[model.name]} if shares else {}
