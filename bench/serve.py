"""`headwater bench serve`: sends load to any OpenAI-compatible server over HTTP and reports the
latencies of users.

The load is spread over worker processes, since one Python process cannot watch the fastest servers.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console

from . import arrivals, datasets
from .datasets import Dialogue, Shape
from .found_server import find_server
from .latency_report import Objective, as_table, samples, summarize
from .plot import check_plot, plot_latencies
from .program import run_program
from .serve_workers import API_KEY, drive
from .trace_file import read_bodies, read_trace

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
    arguments = dict(locals())
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
        {"settings": {name: _plain(value) for name, value in arguments.items()}, **report}, indent=1
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
