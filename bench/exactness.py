"""`headwater bench exactness`: the same bits alone and in any company, on many model shapes, by
many processes at once.

Each process takes shapes in turn and asks an engine on random weights every request alone, together
with others, one after another with prefixes cached, and resumed: tokens, log probabilities, keys
and values have to be equal.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from headwater.engine_core.executors.build.single import build_executor
from headwater.engine_core.options import ExecutorOptions
from headwater.services.runtime.progress import silent

from .exactness_shapes import SHAPES, TINY
from .exactness_trial import Trial
from .figures import print_table
from .part import Row
from .program import check_choice, run_program
from .stress import Stress

OPTIONS: tuple[dict[str, Any], ...] = (
    {"max_num_batched_tokens": 512, "block_size": 64},
    {"max_num_batched_tokens": 8192, "block_size": 64},
    {"max_num_batched_tokens": 131, "block_size": 16, "async_depth": 4},
    {"max_num_batched_tokens": 1024, "block_size": 64, "num_blocks": 150},
)
"""Settings of the engines that share a shape's requests: large and small chunks,
preemption."""
SHOWN = 3
"""Number of differences that are printed for each engine."""


def main(
    shape: Annotated[
        list[str] | None, typer.Option(help="of a model, repeatable: " + ", ".join(SHAPES))
    ] = None,
    requests: Annotated[int, typer.Option(help="of each shape")] = 1000,
    processes: Annotated[int, typer.Option(help="at once on the GPU")] = 8,
    limit: Annotated[
        float, typer.Option(help="seconds; shapes that are not done by then are named")
    ] = 3600.0,
    stress: Annotated[
        bool, typer.Option("--stress", help="streams that lag by lot, and poisoned memory")
    ] = False,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda")] = "auto",
    seed: Annotated[int, typer.Option(help="of requests and delays")] = 0,
    worker: Annotated[int, typer.Option(hidden=True)] = -1,
    as_json: Annotated[
        bool, typer.Option("--json", help="print JSON only, a line as soon as it is known")
    ] = False,
) -> None:
    """Compare answers alone with answers in company."""
    names = shape or list(SHAPES)
    for name in names:
        check_choice("shape", name, SHAPES)
    if requests < 1 or processes < 1:
        raise typer.BadParameter("requests and processes are at least 1")
    tasks = _tasks(names, requests, seed, stress=stress, device=device)
    if worker >= 0:
        for task in tasks[worker::processes]:
            print(json.dumps(task.run()), flush=True)
        return
    flags = [
        f"--requests={requests}",
        f"--processes={processes}",
        f"--device={device}",
        f"--seed={seed}",
    ]
    flags += [f"--shape={name}" for name in names] + (["--stress"] if stress else [])
    rows = []
    for row in _rows_of_workers(processes, flags, limit):
        rows.append(row)
        if as_json:
            print(json.dumps(row), flush=True)
    done = {row["task"] for row in rows}
    missing = [task.name for task in tasks if task.name not in done]
    if not as_json:
        keys = "task", "requests", "compared", "different", "seconds"
        lines = [
            (*(row[key] for key in keys), "; ".join(row["examples"]))
            for row in sorted(rows, key=itemgetter("task"))
        ]
        print_table(
            ("engine", "requests", "comparisons", "different", "seconds", "for example"), lines
        )
    num_different = sum(row["different"] for row in rows)
    totals = {
        key: sum(row[key] for row in rows)
        for key in ("requests", "rounds", "compared", "different")
    }
    print(json.dumps(totals | {"missing": missing, "rows": rows}))
    raise typer.Exit(1 if num_different or missing else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Requests for one engine of one shape."""

    name: str
    shape: str
    options: dict[str, Any]
    num_requests: int
    seed: int
    stress: bool
    device: str

    def run(self) -> Row:
        began = time.perf_counter()
        is_gpu = self.device == "cuda" or (self.device == "auto" and torch.cuda.is_available())
        config = SHAPES[self.shape] if is_gpu else TINY
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(config))
            options = {"num_blocks": 1500, "max_num_seqs": 64, "num_threads": 1} | self.options
            options |= {"load_format": "dummy", "device": "cuda" if is_gpu else "cpu"}
            executor, engine_config, _ = build_executor(
                ExecutorOptions(model_folder=Path(folder), **options), silent
            )
        stress = Stress(executor, is_on=self.stress and is_gpu, seed=self.seed)
        trial = Trial(executor, engine_config, config["vocab_size"], self.seed, stress)
        with stress:
            differences = [each for found in trial.rounds(self.num_requests) for each in found]
        executor.close()
        return {
            "task": self.name,
            "requests": self.num_requests,
            "rounds": trial.num_rounds,
            "compared": trial.num_compared,
            "different": len(differences),
            "seconds": round(time.perf_counter() - began, 1),
            "examples": [str(each) for each in differences[:SHOWN]],
        }


def _tasks(
    names: Sequence[str], num_requests: int, seed: int, *, stress: bool, device: str
) -> list[Task]:
    share = -(-num_requests // len(OPTIONS))
    return [
        Task(
            name=f"{name}, {options['max_num_batched_tokens']} tokens a step",
            shape=name,
            options=options,
            num_requests=min(share, num_requests - i * share),
            seed=seed + 1000 * i_name + i,
            stress=stress,
            device=device,
        )
        for i_name, name in enumerate(names)
        for i, options in enumerate(OPTIONS)
        if num_requests > i * share
    ]


def _rows_of_workers(processes: int, flags: Sequence[str], limit: float) -> Iterator[Row]:
    """Starts the processes and yields the rows that they print, as they come, until all have ended
    or time is over."""
    end = time.monotonic() + limit
    command = [sys.executable, "-m", "headwater.bench.exactness", *flags]
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / str(i) for i in range(processes)]
        children = []
        for i, file in enumerate(files):
            with file.open("w") as out:
                children.append(subprocess.Popen([*command, f"--worker={i}"], stdout=out))
        seen = [0] * processes
        try:
            while True:
                is_over = (
                    all(child.poll() is not None for child in children) or time.monotonic() > end
                )
                for i, file in enumerate(files):
                    lines = [
                        line
                        for line in file.read_text().splitlines(keepends=True)
                        if line.endswith("\n")
                    ]
                    for line in lines[seen[i] :]:
                        if line.startswith("{"):
                            yield json.loads(line)
                    seen[i] = len(lines)
                if is_over:
                    return
                time.sleep(0.2)
        finally:
            for child in children:
                child.kill()
                child.wait()


if __name__ == "__main__":
    run_program(main)
