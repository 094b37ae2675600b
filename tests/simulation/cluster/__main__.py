"""Real processes under a trace, undisturbed or with seeded faults.

`python -m tests.simulation.cluster --replicas 8 --trace conversation_trace.jsonl`; `… --schedules
200`; one of them again: `… --faults 17`.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import httpx
import numpy as np
import typer
from rich.console import Console

from headwater.bench.program import run_program
from headwater.services.models import store as model_store
from headwater.services.models.demo_model import DEMO_NAME
from headwater.services.models.manifest import ModelManifest
from headwater.services.runtime.process import configure_logging
from headwater.services.runtime.progress import silent
from headwater.services.text.model import load_tokenizer
from tests.forked_cluster import detach_stages
from tests.simulation.cluster.clients import Tally
from tests.simulation.cluster.convergence import Convergence
from tests.simulation.cluster.processes import MAX_MODEL_LEN, Cluster, Shape, new_admin_key
from tests.simulation.cluster.questions import Asker, Question
from tests.simulation.cluster.replayed import replayed
from tests.simulation.cluster.trial import HELD_UP_SECONDS, Outcome, Trials
from tests.simulation.cluster.views import Views
from tests.simulation.routing_traces import Arrival, conversation, ladder

console = Console(stderr=True)


@contextlib.asynccontextmanager
async def trials_on(
    shape: Shape, arrivals: list[Arrival], folder: Path, log_level: str
) -> AsyncIterator[Trials]:
    """Starts a cluster for the length of a scope."""
    model_folder = model_store.pull(
        DEMO_NAME, cache_dir=model_store.default_cache_dir(), progress=silent, device="cpu"
    )
    vocab_size = ModelManifest.read(model_folder).vocab_size
    asker = Asker(DEMO_NAME, load_tokenizer(model_folder), vocab_size, MAX_MODEL_LEN)
    admin_key = new_admin_key()
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=8)
    async with contextlib.AsyncExitStack() as life:
        running = Cluster.running(
            shape, folder, model_folder, admin_key=admin_key, log_level=log_level
        )
        cluster = await life.enter_async_context(running)
        views = await life.enter_async_context(Views.open(cluster))
        http = await life.enter_async_context(
            httpx.AsyncClient(base_url=cluster.rest, limits=limits, timeout=60)
        )
        trials = Trials(cluster, views, http, asker, arrivals)
        await trials.prepare(admin_key)
        yield trials


async def _undisturbed(
    shape: Shape, arrivals: list[Arrival], folder: Path, num: int, rate: float, level: str
) -> tuple[Tally, list[Question]]:
    async with trials_on(shape, arrivals, folder, level) as trials:
        questions = trials.unasked(num, rate)
        return await trials.undisturbed(questions), questions


def _print_figures(tally: Tally, questions: list[Question], num_replicas: int) -> bool:
    """Prints the measured figures, beside the replay's prediction for our policy and for round
    robin."""
    found: dict[str, Any] = {
        "asked": tally.num_asked,
        "measured": {"hit_rate": round(tally.hit_rate, 4), "ttft_ms": _in_ms(tally.ttft)},
        "replayed": {
            each.policy: {"hit_rate": each.hit_rate, "ttft_ms": _in_ms(each.ttfts)}
            for each in replayed(questions, num_replicas)
        },
        "wrong": tally.wrong,
    }
    print(json.dumps(found))
    return not tally.wrong


def _in_ms(seconds: Sequence[float]) -> dict[str, float]:
    p50, p90, p99 = (round(float(each) * 1e3, 1) for each in np.percentile(seconds, (50, 90, 99)))
    return {"mean": round(float(np.mean(seconds)) * 1e3, 1), "p50": p50, "p90": p90, "p99": p99}


async def _broken(
    shape: Shape,
    arrivals: list[Arrival],
    folder: Path,
    seeds: Sequence[int],
    limit: float,
    patience: float,
    level: str,
) -> bool:
    """Runs schedules; returns whether all of them held. Prints where to go on when the time is
    over."""
    end = time.monotonic() + limit
    failed = []
    num_run = 0
    async with trials_on(shape, arrivals, folder, level) as trials:
        trials.patience = patience
        for seed in seeds:
            if time.monotonic() > end:
                console.print(f"the time is over; go on with --first {seed}")
                break
            while (outcome := await trials.run(seed)).held_up > HELD_UP_SECONDS:
                console.print(
                    f"seed {seed}: this process was held up for {outcome.held_up} s; once more"
                )
            num_run += 1
            failed += [seed] if outcome.wrong else []
            _tell_outcome(outcome)
    print(json.dumps({"run": num_run, "failed": failed}))
    return not failed


async def _convergence(
    shape: Shape, arrivals: list[Arrival], folder: Path, rounds: int, level: str
) -> bool:
    async with trials_on(shape, arrivals, folder, level) as trials:
        convergence = Convergence(trials.cluster, trials.views, trials)
        found = await convergence.measure(rounds)
    print(
        json.dumps(
            {
                "seconds": found,
                "asked": convergence.tally.num_asked,
                "wrong": convergence.tally.wrong,
            }
        )
    )
    return not convergence.tally.wrong


def _tell_outcome(outcome: Outcome) -> None:
    print(json.dumps(dataclasses.asdict(outcome)), flush=True)


def main(
    replicas: Annotated[int, typer.Option(help="engines")] = 3,
    gateways: Annotated[int, typer.Option(help="that share a port")] = 2,
    processors: Annotated[int, typer.Option(help="processors")] = 2,
    output_processors: Annotated[int, typer.Option(help="output processors")] = 2,
    trace: Annotated[
        Path | None,
        typer.Option(help="of Mooncake's format; none: the shared-prefix ladder, generated"),
    ] = None,
    requests: Annotated[int, typer.Option(help="of the trace, while nothing is broken")] = 200,
    rate: Annotated[float, typer.Option(help="of these, a second")] = 10.0,
    schedules: Annotated[
        int, typer.Option(help="of faults, one after another on one cluster; 0: none")
    ] = 0,
    first: Annotated[int, typer.Option(help="their first seed")] = 0,
    faults: Annotated[
        list[int] | None, typer.Option(help="the seed of a schedule, repeatable: again what failed")
    ] = None,
    convergence: Annotated[
        int,
        typer.Option(help="rounds: seconds until everyone agrees again after each kind of loss"),
    ] = 0,
    limit: Annotated[
        float, typer.Option(help="seconds after which no further schedule begins")
    ] = 3600.0,
    patience: Annotated[float, typer.Option(help="limits of time, times this")] = 1.0,
    keep: Annotated[Path | None, typer.Option(help="folder for logs and state, kept")] = None,
    log_level: Annotated[str, typer.Option(help="of every stage")] = "warning",
    fork: Annotated[
        bool, typer.Option(help="stages from a process that has their libraries, which is cheaper")
    ] = False,
) -> None:
    """Real gateways, processors, output processors and engines without a model, NATS and Redis, and
    what must hold."""
    configure_logging("cluster", "error")
    if fork:
        detach_stages()
    shape = Shape(
        engines=replicas,
        gateways=gateways,
        processors=processors,
        output_processors=output_processors,
    )
    arrivals = conversation(trace) if trace is not None else ladder(0)
    seeds = faults or range(first, first + schedules)
    with contextlib.ExitStack() as stack:
        folder = keep or Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="headwater-cluster-"))
        )
        folder.mkdir(parents=True, exist_ok=True)
        if convergence:
            held = asyncio.run(_convergence(shape, arrivals, folder, convergence, log_level))
        elif seeds:
            held = asyncio.run(_broken(shape, arrivals, folder, seeds, limit, patience, log_level))
        else:
            held = _print_figures(
                *asyncio.run(_undisturbed(shape, arrivals, folder, requests, rate, log_level)),
                replicas,
            )
    sys.exit(0 if held else 1)


if __name__ == "__main__":
    run_program(main)
