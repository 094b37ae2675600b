"""One process a rank behind the contract of an executor: plans go out once to all ranks, results
come from the first.

Knows nothing of devices: each rank's process builds an executor of its own (`rank_process`).
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from typing import cast

import torch

from ...config import ConfigError, EngineConfig
from ...executor import DrawPlan, StepPlan, StepResult, UInt8Array
from ...options import BuildRequest, ExecutorOptions, Progress
from ...parallel.host_address import listen
from ...parallel.host_proof import read_secret
from ...parallel.plan_messages import encode_draw, encode_prepare, encode_step, encode_warm_up
from ...parallel.rank_facts import RankFigures, RankLost
from ...parallel.ranks import Ranks
from ...parallel.result_messages import (
    Hello,
    Loading,
    RankPrepared,
    Refusal,
    WarmedUp,
    Warned,
    decode_report,
    decode_result,
)
from ...parallel.stage_hosts import StageHosts
from ...platforms.device import Device, ParallelDevice
from ...platforms.loading import LoadedDevice
from ..model.block_bytes import block_bytes_of
from ..tiers.rank_swapper import RankSwapper
from .rank import map_slots
from .stage_offer import make_offer

log = logging.getLogger(__name__)
LEAST_SILENCE = 2.0
"""Seconds in which ranks may compute no plan; more where a step is expected to take longer."""
COMPILING_SILENCE = 15.0
"""`LEAST_SILENCE` of ranks whose steps may compile a rare kernel or capture a graph first."""
AWAITING_SECONDS = 1.0
"""Between two words about stages that are missing."""
PATIENCE = 10
"""Times the predicted time of a step after which its ranks hang; once more for each draft that they
draw before it."""


class MultiExecutor:
    """See `Executor` and `RankedExecutor`. Every method may raise `RankLost`; then it can only be
    closed."""

    computes_at_once = False

    def __init__(
        self,
        ranks: Ranks,
        hello: Hello,
        *,
        attention_work: float,
        launches: bool = False,
        slots: UInt8Array | None = None,
    ) -> None:
        """`attention_work`: see `ModelConfig`. `launches`: ranks launch work on devices and prepare
        launches ahead of time. `slots`: the host memory where ranks keep blocks, if they do."""
        self.ranks = ranks
        self._speaker = ranks.layout.speaker
        self.swapper = None if slots is None else RankSwapper(ranks, slots, hello.seconds_per_block)
        self.can_draft = hello.can_draft
        self.prefill_seconds = hello.prefill_seconds
        self.copies_blocks = hello.copies_blocks
        self._prepares = launches
        self._least_silence = COMPILING_SILENCE if launches else LEAST_SILENCE
        self._budget = hello.config.max_num_batched_tokens
        self._attention_work = attention_work
        self._longest_step: float | None = None
        """Seconds of a step of the whole budget; None: nothing is known, and much is still to be
        compiled."""
        self._slowest_step = self._last_retired = 0.0
        self._launched: deque[tuple[float, float, int]] = deque()
        """When each plan in flight was launched, its predicted seconds and the drafts of a row
        before it."""

    def submit(self, plan: StepPlan) -> int:
        num_drafts = 0
        if plan.num_drafts is not None and plan.draft_ids is None:
            num_drafts = int(plan.num_drafts.max(initial=0))
        # Over a long prefix most of a step's time is attention.
        self._launch(
            encode_step(plan),
            plan.num_tokens + plan.num_attended * self._attention_work,
            num_drafts,
        )
        return plan.step

    def draw(self, plan: DrawPlan) -> int:
        self._launch(encode_draw(plan), len(plan.rows))
        return plan.step

    def retire(self, handle: int) -> StepResult:
        result = decode_result(self.ranks.receive(self._speaker))
        launched, *_ = self._launched.popleft()
        now = time.monotonic()
        self._slowest_step = max(self._slowest_step, now - max(launched, self._last_retired))
        self._last_retired = now
        return result

    def is_ready(self, handle: int) -> bool:
        return self.ranks.has_word(self._speaker)

    def warm_up(self) -> float:
        self.ranks.tell(encode_warm_up())
        seconds = [_warmed_up(self.ranks, rank) for rank in range(self.ranks.size)]
        self._longest_step = max(seconds)
        return self._longest_step

    def _launch(self, message: bytes, work: float, num_drafts: int = 0) -> None:
        """`work` in tokens that attend to nothing."""
        predicted = (self._longest_step or 0.0) * work / self._budget
        self._launched.append((time.monotonic(), predicted, num_drafts))
        if self._longest_step is not None:
            _, seconds, drafts = zip(*self._launched, strict=True)
            # A pass of what drafts takes no longer than a step.
            most = (PATIENCE + max(drafts)) * max(self._slowest_step, *seconds)
            self.ranks.allow_silence(max(self._least_silence, most))
        self.ranks.tell(message)

    def prepare(self) -> bool:
        if self._prepares:
            self.ranks.tell(encode_prepare())
            report = decode_report(self.ranks.receive(self._speaker))
            assert isinstance(report, RankPrepared)
            self._prepares = report.is_more_left
        return self._prepares

    def rank_figures(self) -> list[RankFigures]:
        return self.ranks.board.figures()

    def on_rank_lost(self, tell: Callable[[RankLost], None]) -> None:
        self.ranks.on_lost(tell)

    def close(self) -> None:
        self.ranks.close()


def check_num_ranks(options: ExecutorOptions, device: Device) -> None:
    """Raises `ConfigError` for more ranks than the machine has room for."""
    most = cast("ParallelDevice", device).max_ranks(options)
    stages = options.pipeline_parallel_size
    if num_local_ranks(options) <= most:
        return
    allowed = f"at most {most} ranks on this machine, on the platform {device.name}"
    if options.tensor_parallel_size == 1:
        raise ConfigError("pipeline_parallel_size", stages, allowed)
    if stages > 1:
        allowed += f", and pipeline_parallel_size is {stages}"
    raise ConfigError("tensor_parallel_size", options.tensor_parallel_size, allowed)


def num_local_ranks(options: ExecutorOptions) -> int:
    """Ranks on this host."""
    return len(options.ranks_beside(0))


def build_ranks(
    request: BuildRequest, loaded: LoadedDevice, progress: Progress
) -> tuple[MultiExecutor, EngineConfig]:
    """Raises `ConfigError` where a rank is refused, and `RankLost`."""
    options = request.options
    device = loaded.device
    parallel = cast("ParallelDevice", device)
    variables = [parallel.rank_variables(options, rank) for rank in range(num_local_ranks(options))]
    copies = options.copies_ranks and device.capabilities.copied_ranks
    hosts = _stage_hosts(options, loaded) if options.stage_hosts else None
    ranks = Ranks(
        options,
        options.num_threads or torch.get_num_threads(),
        variables,
        copies=copies,
        hosts=hosts,
    )
    try:
        _await_hosts(ranks, options, progress)
        hellos = _hellos(ranks, progress)
        assert all(hello == hellos[0] for hello in hellos)
        config = hellos[0].config
        slots = (
            map_slots(ranks.slots, config, block_bytes_of(request))
            if config.num_swap_slots
            else None
        )
    except BaseException:
        ranks.close()
        raise
    work = request.model.attention_work
    launches = device.capabilities.graphs
    return MultiExecutor(
        ranks, hellos[0], attention_work=work, launches=launches, slots=slots
    ), config


def _stage_hosts(options: ExecutorOptions, loaded: LoadedDevice) -> StageHosts:
    if options.stage_secret_file is None:
        raise ConfigError(
            "stage_secret_file", None, "a file with the secret of the stages on other hosts"
        )
    secret = read_secret(options.stage_secret_file)
    return StageHosts(
        listen("stage_listen", options.stage_listen),
        secret,
        options.layout,
        options.stage_hosts,
        make_offer(options, loaded),
    )


def _await_hosts(ranks: Ranks, options: ExecutorOptions, progress: Progress) -> None:
    """Returns when every stage has its host, or a rank is lost, which says why itself. Meanwhile
    progress names those that are missing."""
    while missing := ranks.missing_stages:
        which = " and ".join(map(str, missing))
        stages = f"stage {which} is" if len(missing) == 1 else f"stages {which} are"
        phase = f"waiting for other hosts at {options.stage_listen}: {stages} missing"
        progress(phase, options.stage_hosts - len(missing), options.stage_hosts)
        ranks.await_stages(AWAITING_SECONDS)


def _hellos(ranks: Ranks, progress: Progress) -> list[Hello]:
    """The `Hello` of each rank, in their order. A rank may wait for others that load longer, saying
    nothing meanwhile. So all of them are read: the server takes a start without progress for one
    that hangs. Raises `ConfigError` where a rank is refused, and `RankLost`."""
    hellos: dict[int, Hello] = {}
    loading: dict[int, Loading] = {}
    while len(hellos) < ranks.size:
        rank, message = ranks.receive_any(
            [rank for rank in range(ranks.size) if rank not in hellos]
        )
        match report := decode_report(message):
            case Hello():
                hellos[rank] = report
                loading.pop(rank, None)
            case Refusal():
                raise ConfigError(report.name, report.value, report.allowed)
            case Loading():
                loading[rank] = report
                last = min(loading.values(), key=lambda each: each.done / max(each.total, 1))
                progress(last.phase, last.done, last.total)
            case Warned():
                log.warning("%s", report.text)
            case WarmedUp() | RankPrepared():
                raise AssertionError(report)
    return [hellos[rank] for rank in range(ranks.size)]


def _warmed_up(ranks: Ranks, rank: int) -> float:
    report = decode_report(ranks.receive(rank))
    assert isinstance(report, WarmedUp)
    return report.seconds
