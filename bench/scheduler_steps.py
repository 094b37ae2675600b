"""Measures the host's cost of a step: scheduler and bookkeeping with the simulated executor at zero
model time.

`python -m headwater.bench.scheduler_steps`; the executor's own time is measured apart.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count, islice
from statistics import median
from typing import Annotated

import numpy as np
import typer

from headwater.engine_core.config import EngineConfig
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

from .figures import AsJson, show_rows
from .program import run_program
from .timed_executor import TimedExecutor

VOCAB_SIZE = 32_000
FEW_TOKENS = 4
"""Size of a vocabulary whose texts repeat themselves: each draft finds a match, and one in four
tokens of it stands."""
MAX_DRAFTS = 15
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
    """Requests that follow one another, so that as many run at any time; their ends are spread over
    the steps."""

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
    """Microseconds a step: the median over rounds of the mean over a round's steps."""

    workload: str
    num_running: int
    async_depth: int
    block_size: int
    num_tenants: int
    engine_us: float
    """Microseconds of adding requests, scheduling and settling, without the executor's time."""
    executor_us: float
    steps_per_second: int
    """Steps a second by the engine's time alone."""
    admitted_per_step: float
    tokens_per_row: float
    """Number of tokens of a row in a step: more than one where drafts stand."""


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
) -> Measurement:
    """Runs the workload until it is steady, then times rounds of steps. With several tenants, each
    has a waiting request."""
    max_model_len = workload.prompt_len + block_size + workload.answer_len
    config = EngineConfig(
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
    )
    model = SimulatedModel(
        vocab_size=workload.vocab_size, num_state_units=num_units(workload.state_pages)
    )
    executor = TimedExecutor(SimulatedExecutor(config, model, TIMING))
    engine = Engine(config, executor.as_executor, speculator=_speculator(workload, config))
    requests = workload_requests(workload, num_running, block_size, num_tenants)
    # A few always wait, so that a row which falls free is taken by the next step.
    for request in islice(requests, num_running + max(8, num_tenants)):
        engine.add(request)
    run_steps(engine, requests, steps_per_round)
    num_admitted = 0
    num_tokens = 0
    num_launched = 0
    engine_us = []
    executor_us = []
    for _ in range(ROUNDS):
        before = executor.seconds
        steps_before = executor.num_steps
        start = time.perf_counter()
        admitted, tokens = run_steps(engine, requests, steps_per_round)
        num_admitted = num_admitted + admitted
        num_tokens = num_tokens + tokens
        seconds = time.perf_counter() - start
        executors = executor.seconds - before
        launched = (
            executor.num_steps - steps_before
        )  # Some calls launch nothing, while rows wait for results.
        num_launched += launched
        engine_us.append((seconds - executors) / launched * 1e6)
        executor_us.append(executors / launched * 1e6)
    return Measurement(
        workload=workload.name,
        num_running=num_running,
        async_depth=async_depth,
        block_size=block_size,
        num_tenants=num_tenants,
        engine_us=round(median(engine_us), 1),
        executor_us=round(median(executor_us), 1),
        steps_per_second=round(1e6 / median(engine_us)),
        admitted_per_step=round(num_admitted / num_launched, 2),
        tokens_per_row=round(num_tokens / (num_launched * num_running), 2),
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


def run_steps(engine: Engine, requests: Iterator[NewRequest], num_steps: int) -> tuple[int, int]:
    """Steps `num_steps` times, each finished request being followed by a new one; returns the
    numbers of finished requests and of tokens."""
    num_added = num_tokens = 0
    for _ in range(num_steps):
        if (output := engine.step()) is None:
            continue
        num_tokens += len(output.token_ids)
        for _ in output.finishes:
            engine.add(next(requests))
            num_added += 1
    return num_added, num_tokens


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
    as_json: AsJson = False,
) -> None:
    """Host time of an engine step at zero model time."""
    rows = [
        measure(
            workload,
            num_running=num_running,
            async_depth=async_depth,
            block_size=block_size,
            steps_per_round=min(steps, MAX_STEPS_PER_ROUND),
            num_tenants=tenants,
        )
        for workload in WORKLOADS
    ]
    show_rows(rows, "an engine step without a model", as_json=as_json)


if __name__ == "__main__":
    run_program(main)
