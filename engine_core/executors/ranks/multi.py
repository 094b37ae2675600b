"""One process a rank behind the contract of an executor: plans go out once to all ranks, results
come from the first.

Knows nothing of devices: each rank's process builds an executor of its own (`rank_process`).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from ...executor import DrawPlan, StepPlan, StepResult, UInt8Array
from ...parallel.plan_messages import encode_draw, encode_prepare, encode_step, encode_warm_up
from ...parallel.rank_facts import RankFigures, RankLost
from ...parallel.ranks import Ranks
from ...parallel.result_messages import (
    Hello,
    RankPrepared,
    WarmedUp,
    decode_report,
    decode_result,
)
from ..tiers.rank_swapper import RankSwapper
from .rank_adapters import RankHostAdapters

LEAST_SILENCE = 2.0
"""Seconds in which ranks may compute no plan; more where a step is expected to take longer."""
COMPILING_SILENCE = 15.0
"""`LEAST_SILENCE` of ranks whose steps may compile a rare kernel or capture a graph first."""
PATIENCE = 10
"""Factor on a step's predicted time after which its ranks are taken to hang; one more for each
draft that they draw before it."""
LaunchedPlan = tuple[float, float, int]
"""A plan in flight: time of launch, predicted seconds, and drafts of a row before it."""


class UnknownTimes:
    """Times of steps before the warm-up, when much is still to be compiled: no silence is too
    long."""

    def predicted(self, work: float) -> float:
        return 0.0

    def silence(self, slowest: float, launched: Iterable[LaunchedPlan]) -> float:
        return 0.0


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Times of steps by that of the longest one, in seconds."""

    longest: float
    """Time of a step of the whole budget."""
    budget: int
    """Tokens."""
    least_silence: float

    def predicted(self, work: float) -> float:
        """Time of a step. `work`: in tokens that attend to nothing."""
        return self.longest * work / self.budget

    def silence(self, slowest: float, launched: Iterable[LaunchedPlan]) -> float:
        """The longest silence of ranks that compute. `slowest`: of the steps so far."""
        _, seconds, drafts = zip(*launched, strict=True)
        # A pass of what drafts takes no longer than a step.
        most: float = (PATIENCE + max(drafts)) * max(slowest, *seconds)
        return max(self.least_silence, most)


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
        has_copies: bool = False,
        adapters: RankHostAdapters | None = None,
    ) -> None:
        """`attention_work`: see `ModelConfig`. `launches`: ranks launch work on devices and prepare
        launches ahead of time. `slots`: the host memory where ranks keep blocks, if they do;
        `has_copies`: see `RankSwapper`.
        `adapters`: those in host memory; None: devices have no slots."""
        self.ranks = ranks
        self._speaker = ranks.layout.speaker
        self.swapper = None
        if slots is not None:
            seconds = hello.seconds_per_block
            self.swapper = RankSwapper(ranks, slots, seconds, has_copies=has_copies)
        self.host_adapters = adapters
        self.can_draft = hello.can_draft
        self.prefill_seconds = hello.prefill_seconds
        self.copies_blocks = hello.copies_blocks
        self._prepares = launches
        self._least_silence = COMPILING_SILENCE if launches else LEAST_SILENCE
        self._budget = hello.config.max_num_batched_tokens
        self._attention_work = attention_work
        self._times: StepTimes | UnknownTimes = UnknownTimes()
        self._slowest_step = self._last_retired = 0.0
        self._launched: deque[LaunchedPlan] = deque()

    def submit(self, plan: StepPlan) -> int:
        num_drafts = 0
        if plan.num_drafts is not None and plan.draft_ids is None:
            num_drafts = int(plan.num_drafts.max(initial=0))
        if plan.copied_adapters:
            assert self.host_adapters is not None
            plan = replace(plan, copied_adapters=self.host_adapters.placed(plan.copied_adapters))
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
        self.ranks.send(encode_warm_up())
        seconds = [_warmed_up(self.ranks, rank) for rank in range(self.ranks.size)]
        longest = max(seconds)
        self._times = StepTimes(longest, self._budget, self._least_silence)
        return longest

    def _launch(self, message: bytes, work: float, num_drafts: int = 0) -> None:
        """`work`: in tokens that attend to nothing."""
        self._launched.append((time.monotonic(), self._times.predicted(work), num_drafts))
        self.ranks.allow_silence(self._times.silence(self._slowest_step, self._launched))
        self.ranks.send(message)

    def prepare(self) -> bool:
        if self._prepares:
            self.ranks.send(encode_prepare())
            report = decode_report(self.ranks.receive(self._speaker))
            assert isinstance(report, RankPrepared)
            self._prepares = report.is_more_left
        return self._prepares

    def rank_figures(self) -> list[RankFigures]:
        return self.ranks.board.figures()

    def on_rank_lost(self, report: Callable[[RankLost], None]) -> None:
        self.ranks.on_lost(report)

    def close(self) -> None:
        self.ranks.close()


def _warmed_up(ranks: Ranks, rank: int) -> float:
    report = decode_report(ranks.receive(rank))
    assert isinstance(report, WarmedUp)
    return report.seconds
