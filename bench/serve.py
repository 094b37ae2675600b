"""`headwater bench serve`: sends load to any OpenAI-compatible server over HTTP and reports the
latencies of users.

The load is spread over worker processes, since one Python process cannot watch the fastest servers.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
import uvloop
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

from . import arrivals, datasets
from .datasets import Dialogue, Shape
from .found_server import find_server
from .latency_report import Objective, as_table, samples, summarize
from .plot import check_plot, plot_latencies
from .program import run_program
from .sse_client import Outcome, ServerLostError, SseConnection
from .trace_file import read_bodies, read_trace

API_KEY = "HEADWATER_API_KEY"
"""Environment variable with the key that is sent, when there is one."""
START_SECONDS = 120.0
"""Seconds that the slowest worker is waited for."""
LEAST_RATE = 1e-3
"""Least rate, factor or shape of arrivals: above 0, since they divide by it."""


class Dataset(StrEnum):
    """Source of requests."""

    random = "random"
    shared_prefix = "shared-prefix"
    chat = "chat"
    trace = "trace"
    jsonl = "jsonl"


class Arrival(StrEnum):
    """Arrival process of requests; `closed` keeps a number of them under way."""

    closed = "closed"
    poisson = "poisson"
    gamma = "gamma"
    ramp = "ramp"


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One worker's part of the load."""

    base_url: str
    dialogues: list[Dialogue]
    offsets: list[float] | None
    """Seconds after the start, one for each dialogue; None: closed loop."""
    concurrency: int
    """Number of dialogues at once in a closed loop."""


def run(
    base_url: Annotated[
        str | None, typer.Option(help="server under test; default: the deployment on this machine")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="served name; default: the first that the server lists")
    ] = None,
    dataset: Annotated[Dataset, typer.Option(help="source of the prompts")] = Dataset.random,
    path: Annotated[Path | None, typer.Option(help="file of a trace or jsonl dataset")] = None,
    num_requests: Annotated[
        int, typer.Option(min=1, help="requests, or conversations of a chat")
    ] = 64,
    prompt_len: Annotated[
        int,
        typer.Option(
            min=1,
            help="tokens of a prompt, or of its part after a shared prefix; words of a chat's turn",
        ),
    ] = 256,
    output_len: Annotated[int, typer.Option(min=1, help="tokens of an answer")] = 128,
    prefix_len: Annotated[int, typer.Option(min=0, help="tokens of a shared prefix")] = 1024,
    num_groups: Annotated[int, typer.Option(min=1, help="distinct shared prefixes")] = 8,
    num_turns: Annotated[int, typer.Option(min=1, help="turns of a chat")] = 3,
    vocab_size: Annotated[
        int,
        typer.Option(min=datasets.FIRST_ORDINARY_ID + 1, help="prompt ids are drawn below this"),
    ] = 49152,
    arrival: Annotated[Arrival, typer.Option(help="how requests arrive")] = Arrival.closed,
    concurrency: Annotated[int, typer.Option(min=1, help="requests at once in a closed loop")] = 16,
    rate: Annotated[
        float,
        typer.Option(
            min=LEAST_RATE, help="requests a second of poisson and gamma; first rate of a ramp"
        ),
    ] = 4.0,
    speed: Annotated[
        float,
        typer.Option(
            min=LEAST_RATE, help="factor by which a trace is replayed faster than recorded"
        ),
    ] = 1.0,
    last_rate: Annotated[float, typer.Option(min=LEAST_RATE, help="last rate of a ramp")] = 16.0,
    burstiness: Annotated[
        float, typer.Option(min=LEAST_RATE, help="shape of gamma gaps; below 1 makes bursts")
    ] = 0.5,
    slo_ttft_ms: Annotated[
        float | None, typer.Option(help="objective: time to first token")
    ] = None,
    slo_tpot_ms: Annotated[
        float | None, typer.Option(help="objective: time per output token")
    ] = None,
    slo_e2e_ms: Annotated[float | None, typer.Option(help="objective: whole request")] = None,
    workers: Annotated[int, typer.Option(min=0, help="client processes; 0: half the cores")] = 0,
    warmup: Annotated[
        int, typer.Option(min=0, help="random requests sent first and not counted")
    ] = 0,
    seed: Annotated[int, typer.Option(help="seed of prompts and arrivals")] = 0,
    as_text: Annotated[
        bool,
        typer.Option(help="send text and OpenAI's fields only, for servers that take no token ids"),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON only")] = False,
    output: Annotated[Path | None, typer.Option(help="also write the JSON here")] = None,
    plot: Annotated[
        Path | None, typer.Option(help="also plot latencies: a .png, .svg, .pdf or .html file")
    ] = None,
) -> None:
    """Measure a server: throughput, TTFT, TPOT, ITL, goodput."""
    check_plot(plot)
    _check_file(dataset, path)
    base_url, model = find_server(base_url, model, os.environ.get(API_KEY, ""))
    told = dict(locals())
    rng = np.random.default_rng(seed)
    shape = Shape(
        prompt_len=prompt_len,
        output_len=output_len,
        vocab_size=vocab_size,
        model=model,
        as_text=as_text,
    )
    workers = workers or max(1, (os.cpu_count() or 2) // 2)
    first = list(datasets.random_prompts(warmup, shape, rng))
    offsets: list[float] | None = None
    if dataset is Dataset.trace:
        assert path is not None
        timed = list(datasets.trace(path, shape))[:num_requests]
        offsets = [at / speed for at, _ in timed]
        dialogues = [dialogue for _, dialogue in timed]
    else:
        dialogues = list(
            _dialogues(dataset, num_requests, shape, rng, path, prefix_len, num_groups, num_turns)
        )
        offsets = _offsets(arrival, len(dialogues), rate, last_rate, burstiness, rng)
    if first:
        drive(base_url, first, None, min(warmup, concurrency), workers, quiet=True)
    outcomes, wall_seconds = drive(
        base_url, dialogues, offsets, concurrency, workers, quiet=as_json
    )
    objective = Objective(ttft_ms=slo_ttft_ms, tpot_ms=slo_tpot_ms, e2e_ms=slo_e2e_ms)
    report = summarize(outcomes, wall_seconds, objective)
    load = f"{concurrency} at once" if offsets is None else f"{arrival.value} {rate:g}/s"
    title = f"{dataset.value}, {f'trace at {speed:g}×' if dataset is Dataset.trace else load}"
    figures = json.dumps(
        {"settings": {name: _plain(value) for name, value in told.items()}, **report}, indent=1
    )
    if output is not None:
        output.write_text(figures + "\n")
    if plot is not None:
        limits = {"TTFT": slo_ttft_ms, "TPOT": slo_tpot_ms, "end to end": slo_e2e_ms}
        plot_latencies(plot, samples(outcomes), limits, f"{model}: {title}", figures)
    if as_json:
        print(json.dumps(report))
    else:
        Console().print(as_table(report, title))
    raise typer.Exit(1 if report["failed"] else 0)


def _check_file(dataset: Dataset, path: Path | None) -> None:
    """Reads a dataset's file, so that a fault in it is named before a server is looked for."""
    if dataset not in (Dataset.trace, Dataset.jsonl):
        return
    if path is None:
        raise typer.BadParameter(f"--dataset {dataset.value} needs --path")
    (read_trace if dataset is Dataset.trace else read_bodies)(path)


def _plain(value: object) -> object:
    return str(value) if isinstance(value, (Path, StrEnum)) else value


def drive(
    base_url: str,
    dialogues: list[Dialogue],
    offsets: list[float] | None,
    concurrency: int,
    workers: int,
    *,
    quiet: bool,
) -> tuple[list[Outcome], float]:
    """Sends every dialogue and returns the outcomes of all turns and the wall time from the first
    to the last."""
    workers = max(
        1, min(workers, len(dialogues), concurrency if offsets is None else len(dialogues))
    )
    context = multiprocessing.get_context("spawn")
    done = context.Value("i", 0)
    next_dialogue = context.Value("i", 0)
    ready = context.Barrier(workers)
    processes = []
    pipes = []
    for worker in range(workers):
        share = Share(
            base_url=base_url,
            # A closed loop is one over all workers: whichever lane is free first takes the next
            # one.
            dialogues=dialogues if offsets is None else dialogues[worker::workers],
            offsets=None if offsets is None else offsets[worker::workers],
            concurrency=concurrency // workers + (worker < concurrency % workers),
        )
        reader, writer = context.Pipe(duplex=False)
        process = context.Process(
            target=_work, args=(share, writer, done, next_dialogue, ready), daemon=True
        )
        process.start()
        writer.close()
        processes.append(process)
        pipes.append(reader)
    _watch(done, len(dialogues), processes, quiet=quiet)
    outcomes = [outcome for pipe in pipes for outcome in pipe.recv()]
    for process in processes:
        process.join()
    return outcomes, max(outcome.last_at for outcome in outcomes) - min(
        outcome.sent_at for outcome in outcomes
    )


def _watch(done: Any, total: int, processes: list[Any], *, quiet: bool) -> None:
    columns = (
        "[progress.description]{task.description}",
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), disable=quiet) as progress:
        task = progress.add_task("requests", total=total)
        while done.value < total and any(process.is_alive() for process in processes):
            progress.update(task, completed=done.value)
            time.sleep(0.05)
        progress.update(task, completed=done.value)


def _work(share: Share, pipe: Connection, done: Any, next_dialogue: Any, ready: Any) -> None:
    # A process takes seconds to start, some longer than others: those that are there would meet an
    # idle server.
    ready.wait(START_SECONDS)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        pipe.send(runner.run(_send_all(share, done, next_dialogue)))
    pipe.close()


async def _send_all(share: Share, done: Any, next_dialogue: Any) -> list[Outcome]:
    idle: list[SseConnection] = []
    outcomes: list[Outcome] = []
    headers = {"authorization": f"Bearer {os.environ[API_KEY]}"} if API_KEY in os.environ else {}

    async def talk(dialogue: Dialogue) -> None:
        reply: str | None = None
        while (body := dialogue.next_body(reply)) is not None:
            outcome = await _call(share.base_url, idle, dialogue, body, headers)
            outcomes.append(outcome)
            if outcome.error:
                break
            reply = outcome.reply
        with done.get_lock():
            done.value += 1

    began = time.monotonic()
    if share.offsets is None:

        async def lane() -> None:
            while (number := _take(next_dialogue)) < len(share.dialogues):
                await talk(share.dialogues[number])

        await asyncio.gather(*(lane() for _ in range(share.concurrency)))
    else:

        async def later(offset: float, dialogue: Dialogue) -> None:
            await asyncio.sleep(began + offset - time.monotonic())
            await talk(dialogue)

        await asyncio.gather(*map(later, share.offsets, share.dialogues))
    for connection in idle:
        connection.close()
    return outcomes


def _take(counter: Any) -> int:
    """The next number, unique over all processes."""
    with counter.get_lock():
        counter.value += 1
        return int(counter.value) - 1


async def _call(
    base_url: str,
    idle: list[SseConnection],
    dialogue: Dialogue,
    body: dict[str, Any],
    headers: dict[str, str],
) -> Outcome:
    began = time.monotonic()
    try:
        connection = idle.pop() if idle else await SseConnection.open(base_url)
        outcome = await connection.call(
            dialogue.path, body, headers, keep_reply=dialogue.needs_reply
        )
    except (ServerLostError, OSError) as failure:
        return Outcome(began, began, time.monotonic(), error=str(failure))
    idle.append(connection)
    return outcome


def _dialogues(
    dataset: Dataset,
    num_requests: int,
    shape: Shape,
    rng: np.random.Generator,
    path: Path | None,
    prefix_len: int,
    num_groups: int,
    num_turns: int,
) -> Iterator[Dialogue]:
    if dataset is Dataset.shared_prefix:
        return datasets.shared_prefix(
            num_requests, shape, rng, prefix_len=prefix_len, num_groups=num_groups
        )
    if dataset is Dataset.chat:
        return datasets.chats(num_requests, shape, rng, num_turns=num_turns)
    if dataset is Dataset.jsonl:
        assert path is not None
        return datasets.jsonl(path, shape)
    return datasets.random_prompts(num_requests, shape, rng)


def _offsets(
    arrival: Arrival,
    count: int,
    rate: float,
    last_rate: float,
    burstiness: float,
    rng: np.random.Generator,
) -> list[float] | None:
    if arrival is Arrival.poisson:
        return list(arrivals.poisson(count, rate, rng))
    if arrival is Arrival.gamma:
        return list(arrivals.gamma(count, rate, rng, shape=burstiness))
    if arrival is Arrival.ramp:
        return list(arrivals.ramp(count, rate, last_rate, rng))
    return None


if __name__ == "__main__":
    run_program(run)
