"""`headwater bench engine`: the S and T loads of the workloads on an engine alone, in this process.

The requests are those of `headwater bench line`, a fixed number at once in a closed loop, for an
engine with the settings that `headwater up` gives it: the difference is the cost of the other
stages.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from headwater.engine_core.request import NewRequest
from headwater.services.stack.plan import gpu_defaults

from .figures import print_table
from .offline import Bench
from .program import run_program
from .workloads import CLUSTER_LOADS, MODELS, TINY, ClusterLoad, tried_load, uniform

MOST_WARMUP = 256


def main(
    load: Annotated[
        list[str] | None, typer.Option(help="ids, S1 … T128; repeatable; default: all")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda")] = "auto",
    runs: Annotated[int, typer.Option(help="of each load, after a warm-up; the best counts")] = 2,
    dry_run: Annotated[
        bool, typer.Option(help="a few short requests of each load, on a tiny model")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="print JSON only, a line as soon as it is known")
    ] = False,
) -> None:
    """Measure an engine under the loads of the table, without a cluster around it."""
    if unknown := set(load or ()) - CLUSTER_LOADS.keys():
        raise typer.BadParameter(
            f"load is {', '.join(sorted(unknown))}; allowed: {', '.join(CLUSTER_LOADS)}"
        )
    chosen = {
        name: tried_load(CLUSTER_LOADS[name]) if dry_run else CLUSTER_LOADS[name]
        for name in load or CLUSTER_LOADS
    }
    options: dict[str, object] = {"device": device, "load_format": "dummy"}
    if torch.cuda.is_available() and device != "cpu":
        options |= {
            name.replace("-", "_"): value for name, value in gpu_defaults(os.environ).items()
        }
    rows = []
    for model in dict.fromkeys(each.model for each in chosen.values()):
        those = {name: each for name, each in chosen.items() if each.model == model}
        with tempfile.TemporaryDirectory(prefix="headwater-model-") as folder:
            config = (
                TINY
                if dry_run
                else MODELS[model] | {"vocab_size": min(each.vocab_size for each in those.values())}
            )
            Path(folder, "config.json").write_text(json.dumps(config))
            bench = Bench(Path(folder), options)
        for name, each in those.items():
            rows.append({"load": name, **measure(bench, each, runs)})
            if as_json:
                print(json.dumps(rows[-1]), flush=True)
        bench.close()
    if not as_json:
        print_table(("load", "output tok/s", "seconds"), (row.values() for row in rows))
    print(json.dumps(rows))


def measure(bench: Bench, load: ClusterLoad, runs: int) -> dict[str, Any]:
    """Figures of the best of several runs, each with prompts of its own."""
    closed_loop(bench, requests(bench, load, min(load.concurrency, MOST_WARMUP)), load.concurrency)
    seconds = min(
        closed_loop(bench, requests(bench, load, load.num_requests), load.concurrency)
        for _ in range(max(1, runs))
    )
    num_tokens = load.num_requests * load.output_len
    return {"output_tokens_per_s": round(num_tokens / seconds, 1), "seconds": round(seconds, 4)}


def requests(bench: Bench, load: ClusterLoad, count: int) -> list[NewRequest]:
    return list(bench.requests(uniform(load.model, count, load.prompt_len, load.output_len)))


def closed_loop(bench: Bench, requests: Sequence[NewRequest], concurrency: int) -> float:
    """Seconds to answer all requests, a fixed number of them at any time."""
    began = time.perf_counter()
    engine = bench.engine
    num_left = len(requests)
    waiting: Iterator[NewRequest] = iter(requests)
    for request in islice(waiting, concurrency):
        engine.add(request)
    while num_left:
        if (output := engine.step()) is not None:
            num_left -= len(output.finishes)
            for request in islice(waiting, len(output.finishes)):
                engine.add(request)
    seconds = time.perf_counter() - began
    while engine.has_work():
        engine.step()
    return seconds


if __name__ == "__main__":
    run_program(main)
