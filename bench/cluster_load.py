"""`headwater bench line`: the S and T loads of the workloads against a cluster of its own, on
random weights.

Starts `headwater up` for each model, lets the engine prepare, sends each load in a closed loop, and
reports the CPU time of every process.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from headwater.services.stack.cluster_record import ClusterRecord, StageRecord

from . import datasets, dummy_model
from .latency_report import Objective, summarize
from .own_cluster import own_cluster, wait_until_prepared
from .processes import cpu_seconds
from .program import run_program
from .serve_workers import drive
from .workloads import CLUSTER_LOADS, MODELS, TINY, ClusterLoad, tried_load

MOST_WARMUP = 256

console = Console(stderr=True)


def main(
    up: Annotated[
        list[str] | None,
        typer.Option(help="flag of `headwater up`; repeatable: --up=--device=cuda"),
    ] = None,
    load: Annotated[
        list[str] | None, typer.Option(help="ids, S1 … T128; repeatable; default: all")
    ] = None,
    workers: Annotated[int, typer.Option(help="client processes")] = 6,
    settle: Annotated[
        float,
        typer.Option(help="seconds that an engine has at most to prepare before the first load"),
    ] = 60.0,
    dry_run: Annotated[
        bool, typer.Option(help="a few short requests of each load, on a tiny model")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="print JSON only, a line as soon as it is known")
    ] = False,
) -> None:
    """Measure a cluster under the loads of the table."""
    chosen = {
        name: tried_load(CLUSTER_LOADS[name]) if dry_run else CLUSTER_LOADS[name]
        for name in load or CLUSTER_LOADS
    }
    rows = []
    for model in dict.fromkeys(each.model for each in chosen.values()):
        those = {name: each for name, each in chosen.items() if each.model == model}
        with tempfile.TemporaryDirectory(prefix="headwater-model-") as folder:
            dummy_model.write(model, TINY if dry_run else MODELS[model], Path(folder))
            given = [f"--model={folder}", "--load-format=dummy", *(up or ())]
            began = time.monotonic()
            with own_cluster(given) as (cluster, _):
                ready = round(time.monotonic() - began, 1)
                if not wait_until_prepared(cluster, settle):
                    console.print(
                        f"[yellow]not prepared after {settle:.0f} s: what is missing is made "
                        "under load"
                    )
                prepared = round(time.monotonic() - began, 1)
                for name, each in those.items():
                    rows.append(
                        {
                            "load": name,
                            "ready_s": ready,
                            "prepared_s": prepared,
                            **measure(cluster, each, workers),
                        }
                    )
                    console.print(f"{name}: {rows[-1]['output_tokens_per_s']:.0f} tokens/s")
                    if as_json:
                        print(json.dumps(rows[-1]), flush=True)
    if not as_json:
        Console().print(_table(rows))
    print(json.dumps(rows))
    raise typer.Exit(1 if any(row["failed"] for row in rows) else 0)


def measure(cluster: ClusterRecord, load: ClusterLoad, workers: int) -> dict[str, Any]:
    """Measures a load after a warm-up of as many requests as run at once, up to some hundred."""
    shape = datasets.Shape(
        prompt_len=load.prompt_len,
        output_len=load.output_len,
        vocab_size=load.vocab_size,
        model=cluster.model,
    )
    # Prompts that no load before has had.
    rng = np.random.default_rng()
    workers = workers if load.concurrency > workers else 1
    warmup = min(load.concurrency, MOST_WARMUP)
    drive(
        cluster.rest,
        list(datasets.random_prompts(warmup, shape, rng)),
        None,
        load.concurrency,
        workers,
        quiet=True,
    )
    before = _cpu_seconds(cluster)
    dialogues = list(datasets.random_prompts(load.num_requests, shape, rng))
    outcomes, wall_seconds = drive(
        cluster.rest, dialogues, None, load.concurrency, workers, quiet=True
    )
    after = _cpu_seconds(cluster)
    report = summarize(outcomes, wall_seconds, Objective())
    thousands = max(1, load.num_requests * load.output_len) / 1000
    report["cpu_ms_per_1000_tokens"] = {
        name: round(1000 * (seconds - before.get(name, 0.0)) / thousands, 2)
        for name, seconds in after.items()
    }
    return report


def _cpu_seconds(cluster: ClusterRecord) -> dict[str, float]:
    """CPU seconds of every process of the cluster; an engine's core and its server count
    separately."""
    return {name: cpu_seconds(pid) for stage in cluster.stages for name, pid in _processes(stage)}


def _processes(stage: StageRecord) -> Iterator[tuple[str, int]]:
    yield stage.name, stage.pid
    for i, pid in enumerate(stage.children):
        yield f"{stage.name}/child-{i}", pid


def _table(rows: list[dict[str, Any]]) -> Table:
    """Table of the loads. The CPU time of each process is in the JSON alone."""
    table = Table(
        "load", "output tok/s", "TTFT ms", "p99", "TPOT ms", "CPU ms for 1,000 tokens", "failed"
    )
    for row in rows:
        ttft = row["ttft_ms"]
        cpu = round(sum(row["cpu_ms_per_1000_tokens"].values()), 1)
        cells = (
            row["output_tokens_per_s"],
            ttft["mean"],
            ttft["p99"],
            row["tpot_ms"]["mean"],
            cpu,
            row["failed"],
        )
        table.add_row(row["load"], *map(str, cells))
    return table


if __name__ == "__main__":
    run_program(main)
