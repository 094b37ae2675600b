"""Servers of forks of `headwater up`: one has what stages import, one what engines' cores import.

Both import while the supervisor reads its model folder and starts NATS and Valkey. They stay for
stages that start again, and for replicas that come later; those share the pages of what was
imported.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from ..engine.core.environment import core_environment
from ..engine.core.variables import CORE_FORKS_FD
from ..runtime.forked import STAGE_FORKS_FD, ForkClient, fork_server
from ..runtime.hardware import resolve_device
from .settings import STACK_VARIABLES, StackSettings
from .stage_process import StageProgram

GRAMMARS_MODULE = "headwater.services.grammars.grammars"
STAGE_MODULES = (
    "google.protobuf.json_format",
    "grpc.aio",
    "grpc_health.v1.health",
    "grpc_reflection.v1alpha.reflection",
    "grpc_status.rpc_status",
    "jinja2.sandbox",
    "llguidance",
    "nats.js",
    "redis.asyncio.cluster",
    "starlette.applications",
    "tokenizers",
    "uvicorn",
    "uvloop",
    "headwater.gateway.__main__",
    "headwater.gateway.admin.routes",
    "headwater.gateway.http.app",
    "headwater.services.engine.__main__",
    "headwater.services.engine.stage.grammar_queue",
    "headwater.services.engine.stage.kv_events",
    "headwater.services.engine.stage.peers.plane",
    "headwater.services.engine.stage.prefetches",
    "headwater.services.engine.stage.replica",
    "headwater.services.engine.stage.session",
    "headwater.services.engine.stage.tenant_sweep",
    "headwater.services.engine.stage.waiting_credit",
    "headwater.services.grammars.checker",
    "headwater.services.index.writer",
    "headwater.services.output_processor.pending_usage",
    "headwater.services.output_processor.text_plan",
    "headwater.services.output_processor.token_logprobs",
    "headwater.services.output_processor.transcript",
    "headwater.services.processor.prepare",
    "headwater.services.processor.session",
    "headwater.services.text.stage",
    "headwater.services.text.tokenizer_info",
)
"""Modules that stages import. None of them starts a thread or registers metrics, which would show
in every stage."""
_OF_ALL_CORES = (
    "torch",
    "headwater.engine_core.executors.build.single",
    "headwater.engine_core.models.decoder",
    "headwater.services.engine.core.process",
)
CORE_MODULES = {
    "cpu": (
        *_OF_ALL_CORES,
        "headwater.engine_core.platforms.cpu",
        "headwater.kernels.cpu.compiler.compiler_start",
    ),
    "cuda": (
        "headwater.kernels.launch.triton_hash",
        *_OF_ALL_CORES,
        "headwater.engine_core.executors.build.cuda",
        "headwater.engine_core.layers.linear.ordered",
        "headwater.kernels.launch.compilers_ahead",
        "triton.backends.nvidia.compiler",
        "triton.backends.nvidia.driver",
        "triton.compiler",
    ),
}
"""Modules that the core of an engine imports, by its device. The last one of a CPU and the first
one of a GPU do what is slow once in a process. None of a GPU's calls the driver: a GPU that a
process has opened is closed to its forks."""
VARIABLES_OF_STAGES = ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
"""Variables that differ between engines, and that no module of stages reads at import."""
VARIABLES_OF_CORES = ("CUDA_VISIBLE_DEVICES",)
"""Variables whose values may differ between cores. Imports do not read them; the driver does when
it opens a GPU."""


@dataclass(frozen=True, slots=True)
class ForkServers:
    """Sockets of the fork servers of stages and of cores; None: such processes are started without
    a fork."""

    stages: ForkClient | None
    cores: ForkClient | None

    def read_tokenizers(self, folders: Iterable[Path]) -> None:
        """Has the server of stages read the models' tokenizers for grammars, once for all engines
        and processors: that takes a third of a second of a core, and memory."""
        if self.stages is not None:
            for folder in folders:
                self.stages.prepare(GRAMMARS_MODULE, [str(folder)])

    def for_cores_of(self, engine: StageProgram) -> StageProgram:
        """The engine's program with the descriptor by which it requests its core."""
        if self.cores is None:
            return engine
        return _with(engine, CORE_FORKS_FD, self.cores)

    def for_checks_of(self, processor: StageProgram) -> StageProgram:
        """The processor's program with the descriptor by which it requests its checker of
        grammars."""
        if self.stages is None:
            return processor
        return _with(processor, STAGE_FORKS_FD, self.stages)


def _with(program: StageProgram, variable: str, forks: ForkClient) -> StageProgram:
    """The program with a descriptor of the server, which the variable names."""
    number = forks.socket.fileno()
    env = {**program.env, variable: str(number)}
    return replace(program, env=env, files=(*program.files, number))


NO_FORKS = ForkServers(None, None)


@contextlib.contextmanager
def fork_servers(settings: StackSettings) -> Iterator[ForkServers]:
    """The servers of forks of a cluster, inside the `with` block."""
    own = {name: value for name, value in os.environ.items() if name not in STACK_VARIABLES}
    with contextlib.ExitStack() as stack:
        cores = None
        # This server takes longest to start.
        if modules := _modules_of_cores(settings):
            environment = core_environment(settings.threads, own)
            cores = stack.enter_context(
                fork_server(modules, environment=environment, free_variables=VARIABLES_OF_CORES)
            )
        stages = stack.enter_context(
            fork_server(STAGE_MODULES, environment=own, free_variables=VARIABLES_OF_STAGES)
        )
        yield ForkServers(stages, cores)


def _modules_of_cores(settings: StackSettings) -> tuple[str, ...]:
    """Modules of engines that run from the start on; none where cores are not forked. A cluster
    that may do without engines keeps no memory for them. Where HEADWATER_THREADS sets the number of
    threads, cores start from nothing: they alone say whether the number is one."""
    if (
        settings.executor != "single"
        or not settings.rules.min_replicas
        or "HEADWATER_THREADS" in os.environ
    ):
        return ()
    return CORE_MODULES.get(resolve_device(settings.device), ())
