"""The core: the process that steps the engine, launches the device and does nothing else.

Commands come in and reports go out through shared-memory rings; it sleeps on the command ring when
there is no work and ends when the server is gone. Knows nothing about sessions, gRPC, NATS or
Redis.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import time
from dataclasses import fields, replace
from typing import Any, assert_never

import msgspec

from headwater.engine_core.config import ConfigError, EngineConfig
from headwater.engine_core.engine import Engine
from headwater.engine_core.executor import (
    HostAdapters,
    ReplaceableWeights,
    releasable_of,
    replaceable_of,
)
from headwater.engine_core.executors.build.registry import build_executor
from headwater.engine_core.kv.peer_link import PeerLink
from headwater.engine_core.kv.tiers import key_of, open_disk
from headwater.engine_core.options import ExecutorOptions, ModelFacts
from headwater.engine_core.parallel.rank_facts import RankedExecutor, RankLost
from headwater.engine_core.queue_policies import DEFAULT as DEFAULT_POLICY
from headwater.engine_core.queue_policies import SHORTEST_FIRST
from headwater.engine_core.step_output import EngineLoad, StepOutput
from headwater.engine_core.system.held_memory import held_bytes
from headwater.engine_core.system.ring import PeerGone, RingReader, RingWriter
from headwater.engine_core.waits_for import WaitsFor

from ...runtime import collector
from ...runtime.settings import read_settings
from ..settings import EngineSettings
from .adapters import CoreAdapters, host_adapters_of
from .block_keys import read_block_seal
from .figure_reports import FigureReports
from .kept_costs import KeptCosts
from .mask_table import map_masks
from .messages import (
    Add,
    BoundPrompts,
    Cancel,
    Credit,
    EndPrefetch,
    Ends,
    Fail,
    Failed,
    Forced,
    FromPeers,
    Idle,
    MasksFilled,
    OfAdapters,
    OfEngine,
    OfMasks,
    OfRequests,
    OfWeights,
    Prefetch,
    Prepared,
    Probe,
    Progress,
    Ready,
    Sleep,
    Stall,
    Step,
    Waiting,
    Wake,
    decode_command,
    encode,
)
from .peers import open_peer_link
from .rates import MeasuredExecutor
from .speculation import build_speculator, drafters_of
from .weights import CoreWeights

SPARE_ROWS = 8
"""Requests a step that take the seat of one which is still in flight."""
PATIENCE_SECONDS = 0.0002
"""Seconds between two looks at the device while masks are awaited."""
LOAD_SECONDS = 0.005
"""Seconds between two loads of steps in which no request starts or ends."""
WAITING_SECONDS = 1.0
"""Seconds between two reports of a core that waits for blocks."""
REPEAT_SECONDS = 10.0
"""Seconds between two reports of a start that makes no progress."""
FACTS = ("dtype", "kv_format", "vocab_size", "numerics_id", "refused_fields")
SIZES = (
    *("block_size", "max_model_len", "max_num_seqs", "num_rows", "max_draft_tokens"),
    "blocks_seen",
)
"""Facts of the model and limits of the engine that the server gets unchanged."""
QUIET_SECONDS = 0.05
"""Seconds without a command after which an engine prepares graphs of later steps, so that a client
with one request after another is not delayed each time."""


def run(
    engine: Engine,
    executor: MeasuredExecutor,
    commands: RingReader,
    reports: RingWriter,
    figures: FigureReports | None = None,
    host_adapters: HostAdapters | None = None,
    replaceable: ReplaceableWeights | str = "",
) -> None:
    """Steps until the server closes the command ring. A step's output is written once the next one
    is launched, or there is none to launch: the device does not wait for that, nor do those who
    fill masks share their processor. It is written first where launching computes: it would come a
    whole step late."""
    late_report = LateReport(reports)
    waits = WaitReports(reports)
    loads = LoadReports()
    adapters = CoreAdapters(engine, host_adapters, reports)
    weights = CoreWeights(engine, replaceable, reports)
    is_prepared = False
    is_idle = False
    num_commands = 0
    waits_for = engine.waits_for
    with contextlib.suppress(PeerGone), contextlib.closing(adapters), contextlib.closing(weights):
        while True:
            has_work = waits_for not in (WaitsFor.WORK, WaitsFor.TIME)
            if figures is not None:
                figures.send_when_due(is_idle=not has_work)
            if has_work:
                is_idle = False
                if waits_for is not WaitsFor.NOTHING:
                    late_report.write()
                    waits.write_when_due(engine)
                    commands.wait(PATIENCE_SECONDS)
                    waits_for = engine.waits_for
                    if waits_for is WaitsFor.DEVICE and not commands.is_readable():
                        continue
            else:
                late_report.write()
                if not is_idle or waits_for is WaitsFor.WORK:
                    reports.write(encode(Idle(engine.load(), num_commands)))
                    is_idle = True
                if not (is_prepared or engine.is_asleep):
                    is_prepared = _prepare(executor, commands, reports)
                commands.wait(weights.pause(adapters.pause(engine.pause_seconds)))
            if num_read := _read_commands(engine, adapters, weights, commands):
                num_commands = num_commands + num_read
                is_idle = False
            adapters.settle()
            weights.settle()
            engine.launch()
            late_report.write()
            waits_for = engine.settle()
            if (output := engine.take_output()) is not None:
                # The server waits for a report after each step that has output.
                is_idle = False
                late_report.report = Step(output, *executor.take(), loads.take_due(engine, output))
            if executor.computes_at_once:
                late_report.write()


class LateReport:
    """The report of a step, until there is time to write it."""

    def __init__(self, reports: RingWriter) -> None:
        self._reports = reports
        self.report: Step | None = None

    def write(self) -> None:
        """Writes the costs, if they have changed since they were written."""
        if self.report is not None:
            self._reports.write(encode(self.report))
            self.report = None


class LoadReports:
    """Decides which steps report the engine's load: to describe it takes a tenth of the host's time
    for a step of a small model, and the server publishes it less often."""

    def __init__(self) -> None:
        self._due_at = 0.0

    def take_due(self, engine: Engine, output: StepOutput) -> EngineLoad | None:
        """The load, if a request started or ended in the step, or none was reported for
        `LOAD_SECONDS`."""
        now = time.monotonic()
        if now < self._due_at and not (output.starts or output.finishes):
            return None
        self._due_at = now + LOAD_SECONDS
        return engine.load()


class WaitReports:
    """Sends reports while the core waits for blocks. Without reports the server would take the core
    for hung."""

    def __init__(self, reports: RingWriter) -> None:
        self._reports = reports
        self._due_at = 0.0

    def write_when_due(self, engine: Engine) -> None:
        # A device that computes for too long is to be noticed.
        awaits_blocks = engine.waits_for is WaitsFor.BLOCKS and not engine.has_steps_in_flight
        if awaits_blocks and (now := time.monotonic()) >= self._due_at:
            self._due_at = now + WAITING_SECONDS
            self._reports.write(encode(Waiting(engine.load())))


def _prepare(executor: MeasuredExecutor, commands: RingReader, reports: RingWriter) -> bool:
    """Prepares later steps until there is a command or nothing left to prepare. Returns whether
    nothing is left."""
    commands.wait(QUIET_SECONDS)
    while not commands.is_readable():
        if not executor.prepare():
            reports.write(encode(Prepared()))
            return True
    return False


def _read_commands(
    engine: Engine, adapters: CoreAdapters, weights: CoreWeights, commands: RingReader
) -> int:
    """Applies the commands that have come. Returns how many."""
    messages = commands.read()
    for message in messages:
        command = decode_command(message)
        if isinstance(command, OfAdapters):
            adapters.apply(command)
        elif isinstance(command, OfWeights):
            weights.apply(command)
        else:
            _apply(engine, command)
    return len(messages)


def _apply(engine: Engine, command: OfEngine) -> None:
    if isinstance(command, OfMasks):
        apply_to_masks(engine, command)
    elif isinstance(command, FromPeers):
        engine.take(command.message)
    elif isinstance(command, Prefetch):
        engine.prefetch(command.prefetch)
    elif isinstance(command, EndPrefetch):
        engine.end_prefetch(command.number)
    elif isinstance(command, BoundPrompts):
        engine.bound_prompts(command.seconds)
    elif isinstance(command, Sleep):
        engine.sleep(command.call)
    elif isinstance(command, Wake):
        engine.wake(command.call)
    else:
        _apply_to_requests(engine, command)


def apply_to_masks(engine: Engine, command: OfMasks) -> None:
    match command:
        case MasksFilled(rows, tickets, output_indices, num_masks):
            engine.masks_filled(rows, tickets, output_indices, num_masks)
        case Forced(rows, tickets, output_indices, forced_ids):
            engine.foresee(rows, tickets, output_indices, forced_ids)
        case Fail(keys, errors):
            for key, error in zip(keys, errors, strict=True):
                engine.fail(key, error)
        case _:
            assert_never(command)


def _apply_to_requests(engine: Engine, command: OfRequests) -> None:
    match command:
        case Add(request):
            engine.add(request)
        case Cancel(keys, keeps_answer):
            for key in keys:
                engine.cancel(key, keeps_answer=keeps_answer)
        case Credit(keys, tokens):
            for key, more in zip(keys, tokens, strict=True):
                engine.add_credit(key, more)
        case Stall(keys):
            for key in keys:
                engine.stall(key)
        case Probe(keys):
            engine.ask(keys)
        case _:
            assert_never(command)


def main() -> None:
    ends = msgspec.json.decode(sys.argv[1], type=Ends)
    settings = read_settings(EngineSettings, sys.argv[2:], env={})
    # The server decides when to stop; a terminal's or a supervisor's signal to the group reaches it
    # too.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.Thread(target=_die_with_the_server, args=(ends.lifeline,), daemon=True).start()
    commands = RingReader(ends.commands)
    reports = RingWriter(ends.reports)
    mask_reports = RingWriter(ends.mask_reports)
    seal = read_block_seal(ends.block_keys)
    logging.basicConfig(level=settings.log_level.upper(), format="%(message)s")
    try:
        progress = SpokenProgress(reports)
        options = replace(
            executor_options(settings), copies_ranks=True, weights_holder=ends.weights_holder
        )
        progress("loading libraries", 0, 1)
        executor, config, facts = build_executor(options, progress)
        disk_files = open_disk(options, config, facts, executor, seal)
    except (ConfigError, RankLost) as error:
        reports.write(encode(Failed(str(error))))
        sys.exit(1)
    if isinstance(executor, RankedExecutor):
        executor.on_rank_lost(_end_with_the_rank)
    progress("warming up", 0, 1)
    # Before costs are measured: first steps are slower than later ones.
    longest_step = executor.warm_up()
    measured = MeasuredExecutor(
        executor, prefill_seconds=longest_step / config.max_num_batched_tokens
    )
    with contextlib.closing(measured):
        config = replace(config, policy=_policy_of(settings, config), eviction=settings.eviction)
        progress("measuring steps", 0, 1)
        kept_costs = KeptCosts.of_engine(os.environ, settings, config, facts)
        link = None
        if config.num_peer_blocks:
            key = key_of(options, config, facts, executor)
            link = open_peer_link(ends.records, reports, key, seal, config, executor)
        engine = Engine(
            config,
            measured,
            masks=map_masks(
                ends.masks, config.max_draft_tokens + 1, config.num_rows, facts.vocab_size
            ),
            speculator=build_speculator(settings, config, executor, facts, kept_costs),
            disk_files=disk_files,
            peer_link=link,
            report_masks=lambda report: mask_reports.write(encode(report)),
            memory=releasable_of(executor) if settings.takes_turns else None,
            num_held_bytes=held_bytes(ends.weights_holder),
        )
        with contextlib.closing(engine):
            collector.leave_out_what_exists()
            reports.write(
                encode(
                    _ready(engine, config, facts, longest_step, drafters_of(settings, facts), link)
                )
            )
            run(
                engine,
                measured,
                commands,
                reports,
                FigureReports(executor, reports),
                host_adapters_of(executor),
                replaceable_of(executor),
            )


def _policy_of(settings: EngineSettings, config: EngineConfig) -> str:
    """The queue policy of the settings. The default for an encoder is shortest first: a text is
    computed in one step, so no text waits behind a longer one of its tenant."""
    is_default = settings.policy == DEFAULT_POLICY
    return SHORTEST_FIRST if is_default and not config.has_cache else settings.policy


class SpokenProgress:
    """Reports the beginning of a phase, each tenth of it and its end to the server, and in between
    that it is alive: a core that waits for stages on other hosts does not count as hung."""

    def __init__(self, reports: RingWriter) -> None:
        self._reports = reports
        self._last_progress: tuple[str, int] | None = None
        self._last_progress_at = 0.0

    def __call__(self, phase: str, done: int, total: int) -> None:
        now = (phase, 10 * done // max(total, 1))
        if (
            now != self._last_progress
            or time.monotonic() - self._last_progress_at >= REPEAT_SECONDS
        ):
            self._last_progress = now
            self._last_progress_at = time.monotonic()
            self._reports.write(encode(Progress(phase, done, total, at=time.time())))


def executor_options(settings: EngineSettings) -> ExecutorOptions:
    """Options of the executor: settings of the same names, and options that follow from other
    settings."""
    same: dict[str, Any] = {
        each.name: getattr(settings, each.name)
        for each in fields(ExecutorOptions)
        if hasattr(settings, each.name)
    }
    derived: dict[str, Any] = {
        "num_threads": settings.threads,
        "spare_rows": min(SPARE_ROWS, settings.max_num_seqs),
        "max_draft_tokens": settings.max_draft_tokens if settings.speculates else 0,
    }
    if settings.weights_folder is not None:
        derived["model_folder"] = settings.weights_folder
    return ExecutorOptions(**same | derived)


def _ready(
    engine: Engine,
    config: EngineConfig,
    facts: ModelFacts,
    longest_step: float,
    drafters: tuple[str, ...],
    link: PeerLink | None,
) -> Ready:
    num_rows, row_bytes = (0, 0) if link is None else link.records.shape
    return Ready(
        **{name: getattr(facts, name) for name in FACTS},
        **{name: getattr(config, name) for name in SIZES},
        load=engine.load(),
        longest_step=longest_step,
        drafters=drafters,
        max_chunk_tokens=config.max_chunk,
        num_peer_rows=num_rows,
        peer_row_bytes=row_bytes,
    )


def _end_with_the_rank(lost: RankLost) -> None:
    """Ends the process at once, also while nothing is computed: server and supervisor see it as any
    other end."""
    logging.getLogger(__name__).error("%s", lost)
    os._exit(1)


def _die_with_the_server(lifeline: int) -> None:
    """Ends the process when the server dies: at once, also while the model loads or a step
    computes."""
    os.read(lifeline, 1)
    os._exit(1)


if __name__ == "__main__":
    main()
