"""Measures the host's cost of a step: scheduler and bookkeeping with the simulated executor at zero
model time.

`python -m headwater.bench.scheduler_steps`; the executor's own time is measured apart.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice
from statistics import median
from typing import Annotated

import numpy as np
import typer

from headwater.engine_core.config import EVICTIONS, LRU, EngineConfig
from headwater.engine_core.drafting.ngram import NGramProposer
from headwater.engine_core.drafting.step_costs import StepCosts
from headwater.engine_core.drafting.suffix import SuffixProposer
from headwater.engine_core.engine import Engine
from headwater.engine_core.executors.simulated.executor import SimulatedExecutor, SimulatedTiming
from headwater.engine_core.executors.simulated.model import SimulatedModel
from headwater.engine_core.executors.simulated.states import num_units
from headwater.engine_core.request import NewRequest
from headwater.engine_core.sampling_params import SamplingParams
from headwater.engine_core.scheduling.speculation.adaptive_speculator import AdaptiveSpeculator
from headwater.services.runtime.collector import leave_out_what_exists

from .figures import AsJson, show_rows
from .program import check_choice, run_program
from .timed_executor import TimedExecutor

VOCAB_SIZE = 32_000
FEW_TOKENS = 4
"""Size of a vocabulary whose texts repeat: each draft finds a match, and one in four of its tokens
is accepted."""
MAX_DRAFTS = 15
ATTENTION_PIVOT = 23_500
"""Position at which attention of an 8B model takes as long as its weights."""
NUMBER_LEN = 8
"""Number of tokens that distinguish a prompt from all others."""
ROUNDS = 5
# So late that a result is fetched only when as many steps are in flight as may be.
TIMING = SimulatedTiming(late_polls=2**31)
# Answers this long outlast the measurement.
SHORTEST_STEADY = 8192
MAX_STEPS_PER_ROUND = SHORTEST_STEADY // (ROUNDS + 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Requests that replace one another, so that the same number runs at any time; their ends are
    spread over the steps."""

    name: str
    prompt_len: int
    answer_len: int
    vocab_size: int = VOCAB_SIZE
    max_drafts: int = 0
    """Number of tokens that n-gram and suffix drafters may draft for a row and step; 0: without
    speculation."""
    drafts_are_free: bool = False
    """Whether a step takes as long with drafts as without, so that rows are drafted for in each."""
    executor_drafts: bool = False
    """Whether the executor looks n-grams up itself, as on a GPU: rows run ahead of their
    results."""
    state_pages: int = 0
    """Pages of a state set; 0: the model has no state layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Microseconds of CPU time a step: the median over rounds of the mean over a round's steps."""

    workload: str
    eviction: str
    num_running: int
    async_depth: int
    block_size: int
    num_tenants: int
    engine_us: float
    """Microseconds of adding requests, scheduling and settling, without the executor's time."""
    executor_us: float
    engine_of_first: float
    """The engine's time as a multiple of that under the first order of eviction: the median over
    rounds in turn."""
    steps_per_second: int
    """Steps a second by the engine's time alone."""
    admitted_per_step: float
    evicted_per_step: float
    """Cached blocks that a step evicts: 0 as long as the cache is not full."""
    tokens_per_row: float
    """Number of tokens of a row in a step: more than one where drafts are accepted."""


STEADY = Workload(name="steady decode", prompt_len=128, answer_len=8192)
DRAFTED = replace(
    STEADY,
    name="steady decode, drafts in each step",
    vocab_size=FEW_TOKENS,
    max_drafts=MAX_DRAFTS,
    drafts_are_free=True,
)
WORKLOADS = (
    STEADY,
    Workload(name="512 in, 256 out", prompt_len=512, answer_len=256),
    Workload(name="128 in, 64 out", prompt_len=128, answer_len=64),
    replace(STEADY, name="steady decode, drafts looked for in vain", max_drafts=MAX_DRAFTS),
    DRAFTED,
    replace(DRAFTED, name="steady decode, drafts by the executor", executor_drafts=True),
    replace(STEADY, name="steady decode, states", state_pages=8),
)


def measure(
    workload: Workload,
    *,
    num_running: int,
    async_depth: int,
    block_size: int,
    steps_per_round: int,
    num_tenants: int = 1,
    evictions: Sequence[str] = (LRU,),
) -> list[Measurement]:
    """Runs the workload under each order of eviction until it is steady, then times rounds of steps
    under each in turn. With several tenants, each has a waiting request."""
    runs = [
        _Run(
            workload,
            _config(workload, num_running, async_depth, block_size, eviction),
            num_tenants,
            steps_per_round,
        )
        for eviction in evictions
    ]
    for _ in range(ROUNDS):
        for run in runs:
            run.time_round()
    return [run.measured(runs[0]) for run in runs]


def _config(
    workload: Workload, num_running: int, async_depth: int, block_size: int, eviction: str
) -> EngineConfig:
    max_model_len = workload.prompt_len + block_size + workload.answer_len
    return EngineConfig(
        block_size=block_size,
        num_blocks=(num_running + 16)
        * (max_model_len // block_size + 2 + 6 * workload.state_pages),
        state_pages=workload.state_pages,
        max_model_len=max_model_len,
        max_num_seqs=num_running,
        max_num_batched_tokens=max(2048, num_running * (1 + workload.max_drafts)),
        max_draft_tokens=workload.max_drafts,
        async_depth=async_depth,
        policy="fair",
        eviction=eviction,
        attention_pivot=ATTENTION_PIVOT,
    )


class _Run:
    """An engine under a workload, and what its rounds took."""

    def __init__(
        self, workload: Workload, config: EngineConfig, num_tenants: int, steps_per_round: int
    ) -> None:
        self._workload = workload
        self._config = config
        self._num_tenants = num_tenants
        self._steps_per_round = steps_per_round
        model = SimulatedModel(
            vocab_size=workload.vocab_size, num_state_units=num_units(workload.state_pages)
        )
        self._executor = TimedExecutor(SimulatedExecutor(config, model, TIMING), time.thread_time)
        self._engine = Engine(
            config, self._executor.as_executor, speculator=_speculator(workload, config)
        )
        num_running = config.max_num_seqs
        self._requests = workload_requests(workload, num_running, config.block_size, num_tenants)
        # A few always wait, so that a row which falls free is taken by the next step.
        for request in islice(self._requests, num_running + max(8, num_tenants)):
            self._engine.add(request)
        run_steps(self._engine, self._requests, steps_per_round)
        self._total = StepCounts()
        self._num_launched = 0
        self._engine_us: list[float] = []
        self._executor_us: list[float] = []

    def time_round(self) -> None:
        executor = self._executor
        before = executor.seconds
        steps_before = executor.num_steps
        start = time.thread_time()
        self._total += run_steps(self._engine, self._requests, self._steps_per_round)
        seconds = time.thread_time() - start
        executors = executor.seconds - before
        # Some calls launch nothing, while rows wait for results.
        launched = executor.num_steps - steps_before
        self._num_launched += launched
        self._engine_us.append((seconds - executors) / launched * 1e6)
        self._executor_us.append(executors / launched * 1e6)

    def measured(self, first: _Run) -> Measurement:
        """The medians; ratios are those to the first run."""
        config = self._config
        engine_us = median(self._engine_us)
        ratios = [
            own / others for own, others in zip(self._engine_us, first._engine_us, strict=True)
        ]
        return Measurement(
            workload=self._workload.name,
            eviction=config.eviction,
            num_running=config.max_num_seqs,
            async_depth=config.async_depth,
            block_size=config.block_size,
            num_tenants=self._num_tenants,
            engine_us=round(engine_us, 1),
            executor_us=round(median(self._executor_us), 1),
            engine_of_first=round(median(ratios), 3),
            steps_per_second=round(1e6 / engine_us),
            admitted_per_step=round(self._total.added / self._num_launched, 2),
            evicted_per_step=round(self._total.evicted / self._num_launched, 2),
            tokens_per_row=round(
                self._total.tokens / (self._num_launched * config.max_num_seqs), 2
            ),
        )


def _speculator(workload: Workload, config: EngineConfig) -> AdaptiveSpeculator | None:
    if not workload.max_drafts:
        return None
    drafters = (
        NGramProposer(config.num_rows, config.max_model_len, workload.max_drafts),
        SuffixProposer(config.num_rows, workload.max_drafts),
    )
    # In vain they are looked for at the price that drafts have on a device: twice the rows, twice
    # the time.
    last = 1.0 if workload.drafts_are_free else 1.0 + workload.max_drafts
    most = config.num_rows * (1 + workload.max_drafts)
    costs = StepCosts.measured([1, config.num_rows, most], [1.0, 1.0, last], gap=0.05)
    return AdaptiveSpeculator(
        drafters,
        costs,
        num_rows=config.num_rows,
        max_drafts=workload.max_drafts,
        vocab_size=workload.vocab_size,
        executor_drafts=NGramProposer.name if workload.executor_drafts else "",
    )


@dataclass(frozen=True, slots=True)
class StepCounts:
    """Counts of the work of some steps."""

    added: int = 0
    tokens: int = 0
    evicted: int = 0
    """Cached blocks that were evicted."""

    def __add__(self, other: StepCounts) -> StepCounts:
        return StepCounts(
            self.added + other.added,
            self.tokens + other.tokens,
            self.evicted + other.evicted,
        )


def run_steps(engine: Engine, requests: Iterator[NewRequest], num_steps: int) -> StepCounts:
    """Steps `num_steps` times, each finished request being followed by a new one."""
    num_added = num_tokens = num_evicted = 0
    for _ in range(num_steps):
        if (output := engine.step()) is None:
            continue
        num_tokens += len(output.token_ids)
        if output.cache_events is not None:
            num_evicted += len(output.cache_events.removed)
        for _ in output.finishes:
            engine.add(next(requests))
            num_added += 1
    return StepCounts(num_added, num_tokens, num_evicted)


def workload_requests(
    workload: Workload, num_running: int, block_size: int, num_tenants: int
) -> Iterator[NewRequest]:
    """Prompts that share nothing and end anywhere in a block, of each tenant in turn; the first
    answers are cut to all lengths."""
    size = workload.vocab_size
    text = np.random.default_rng(0).integers(0, size, workload.prompt_len + block_size).tolist()
    for key in count():
        is_first = key < num_running and workload.answer_len < SHORTEST_STEADY
        answer_len = (
            workload.answer_len * (key + 1) // num_running if is_first else workload.answer_len
        )
        number = [key // size**place % size for place in range(NUMBER_LEN)]
        prompt_ids = [*number, *text[: workload.prompt_len + key % block_size - NUMBER_LEN]]
        sampling = SamplingParams(max_tokens=answer_len, stop_token_ids=(size,))
        tenant = f"tenant-{key % num_tenants}"
        yield NewRequest(
            key=key, prompt_ids=prompt_ids, output_ids=[], sampling=sampling, tenant=tenant
        )


def main(
    num_running: Annotated[int, typer.Option(help="Requests that run at once.")] = 256,
    async_depth: Annotated[int, typer.Option(help="Steps in flight.")] = 2,
    block_size: Annotated[int, typer.Option(help="Tokens a KV block.")] = 16,
    steps: Annotated[int, typer.Option(help="Steps a round, of five.")] = 1000,
    tenants: Annotated[int, typer.Option(help="Whose requests these are, in turn.")] = 1,
    eviction: Annotated[
        list[str], typer.Option(help=f"{' or '.join(EVICTIONS)}; several are timed in turn")
    ] = [LRU],  # noqa: B006 (typer reads the default, and nobody changes it)
    as_json: AsJson = False,
) -> None:
    """Host time of an engine step at zero model time."""
    for each in eviction:
        check_choice("--eviction", each, EVICTIONS)
    # As in an engine's process.
    leave_out_what_exists()
    rows = [
        row
        for workload in WORKLOADS
        for row in measure(
            workload,
            num_running=num_running,
            async_depth=async_depth,
            block_size=block_size,
            steps_per_round=min(steps, MAX_STEPS_PER_ROUND),
            num_tenants=tenants,
            evictions=eviction,
        )
    ]
    show_rows(rows, "an engine step without a model", as_json=as_json)


if __name__ == "__main__":
    run_program(main)
