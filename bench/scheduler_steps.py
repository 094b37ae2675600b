"""Measures what a step costs the host: scheduler and bookkeeping with the simulated executor at zero model time.

`python -m headwater.bench.scheduler_steps`; the executor's own time is measured apart.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import count
from statistics import median
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from headwater.engine_core.config import EngineConfig
from headwater.engine_core.engine import Engine
from headwater.engine_core.executors.simulated import SimulatedExecutor, SimulatedTiming
from headwater.engine_core.executors.simulated_model import SimulatedModel
from headwater.engine_core.request import NewRequest
from headwater.engine_core.sampling_params import SamplingParams

from .program import run_program
from .timed_executor import TimedExecutor

VOCAB_SIZE = 32_000
ROUNDS = 5
# So late that a result is fetched only when as many steps are in flight as may be.
TIMING = SimulatedTiming(late_polls=2**31)
# Answers this long outlast the measurement.
SHORTEST_STEADY = 8192
MAX_STEPS_PER_ROUND = SHORTEST_STEADY // (ROUNDS + 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Requests that follow one another, so that as many run at any time; their ends are spread over the steps."""

    name: str
    prompt_len: int
    answer_len: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Times are microseconds a step: the median over rounds of the mean over a round's steps."""

    workload: str
    num_running: int
    async_depth: int
    block_size: int
    num_tenants: int
    engine_us: float
    """Adding requests, scheduling and settling; the executor's time is not in it."""
    executor_us: float
    steps_per_second: int
    """By the engine's time alone."""
    admitted_per_step: float


WORKLOADS = (
    Workload(name="steady decode", prompt_len=128, answer_len=8192),
    Workload(name="512 in, 256 out", prompt_len=512, answer_len=256),
    Workload(name="128 in, 64 out", prompt_len=128, answer_len=64),
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
    """Runs the workload until it is steady, then times rounds of steps. Of several tenants each has one that waits."""
    max_model_len = workload.prompt_len + block_size + workload.answer_len
    config = EngineConfig(
        block_size=block_size,
        num_blocks=(num_running + 16) * (max_model_len // block_size + 2),
        max_model_len=max_model_len,
        max_num_seqs=num_running,
        max_num_batched_tokens=max(2048, num_running),
        async_depth=async_depth,
        policy="priority",
    )
    executor = TimedExecutor(SimulatedExecutor(config, SimulatedModel(vocab_size=VOCAB_SIZE), TIMING))
    engine, requests = Engine(config, executor), _requests(workload, num_running, block_size, num_tenants)
    # A few always wait, so that a row which falls free is taken by the next step.
    for _ in range(num_running + max(8, num_tenants)):
        engine.add(next(requests))
    _steps(engine, requests, steps_per_round)
    num_admitted, engine_us, executor_us = 0, [], []
    for _ in range(ROUNDS):
        before, start = executor.seconds, time.perf_counter()
        num_admitted += _steps(engine, requests, steps_per_round)
        seconds, executors = time.perf_counter() - start, executor.seconds - before
        engine_us.append((seconds - executors) / steps_per_round * 1e6)
        executor_us.append(executors / steps_per_round * 1e6)
    return Measurement(
        workload=workload.name,
        num_running=num_running,
        async_depth=async_depth,
        block_size=block_size,
        num_tenants=num_tenants,
        engine_us=round(median(engine_us), 1),
        executor_us=round(median(executor_us), 1),
        steps_per_second=round(1e6 / median(engine_us)),
        admitted_per_step=round(num_admitted / (ROUNDS * steps_per_round), 2),
    )


def _steps(engine: Engine, requests: Iterator[NewRequest], num_steps: int) -> int:
    """Steps `num_steps` times, each finished request being followed by a new one; returns how many were."""
    num_added = 0
    for _ in range(num_steps):
        output = engine.step()
        for _ in output.finishes if output is not None else ():
            engine.add(next(requests))
            num_added += 1
    return num_added


def _requests(workload: Workload, num_running: int, block_size: int, num_tenants: int) -> Iterator[NewRequest]:
    """Prompts that share nothing and end anywhere in a block, of each tenant in turn; the first answers are cut to all
    lengths."""
    text = np.random.default_rng(0).integers(0, VOCAB_SIZE, workload.prompt_len + block_size).tolist()
    for key in count():
        is_first = key < num_running and workload.answer_len < SHORTEST_STEADY
        answer_len = workload.answer_len * (key + 1) // num_running if is_first else workload.answer_len
        prompt_ids = [key % VOCAB_SIZE, key // VOCAB_SIZE, *text[: workload.prompt_len + key % block_size - 2]]
        sampling = SamplingParams(max_tokens=answer_len, stop_token_ids=(VOCAB_SIZE,))
        tenant = f"tenant-{key % num_tenants}"
        yield NewRequest(key=key, prompt_ids=prompt_ids, output_ids=[], sampling=sampling, tenant=tenant)


def main(
    num_running: Annotated[int, typer.Option(help="Requests that run at once.")] = 256,
    async_depth: Annotated[int, typer.Option(help="Steps in flight.")] = 2,
    block_size: Annotated[int, typer.Option(help="Tokens a KV block.")] = 16,
    steps: Annotated[int, typer.Option(help="Steps a round, of five.")] = 1000,
    tenants: Annotated[int, typer.Option(help="Whose requests these are, in turn.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
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
    if as_json:
        typer.echo(json.dumps([asdict(row) for row in rows], indent=2))
        return
    table = Table("workload", "running", "engine µs", "executor µs", "steps/s", "admitted/step")
    for row in rows:
        cells = (row.workload, row.num_running, row.engine_us, row.executor_us, row.steps_per_second)
        table.add_row(*map(str, (*cells, row.admitted_per_step)))
    Console().print(table)


if __name__ == "__main__":
    run_program(main)
