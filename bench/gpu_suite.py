"""`headwater bench gpu`: what there is to know of this commit on a GPU, in under eight minutes.

Runs the tests marked `gpu`, then every offline workload, each model in a process of its own; the last line is JSON.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

TESTS = ("tests/kernels", "tests/engine_core")
SMALL, LARGE = ("O1", "O4"), ("O2", "O3", "O5", "O6", "O7", "O8", "O9")
PEER_SECONDS = {
    "O1": 6.08, "O2": 13.82, "O3": 1.339, "O4": 0.421, "O5": 1.715, "O6": 1.231, "O7": 0.0270, "O8": 5.73, "O9": 2.91
}  # fmt: skip
"""vLLM 0.23.0 on one NVIDIA H200, see docs/benchmarks.md."""
TARGET_SECONDS = {
    "O1": 4.9, "O2": 11.5, "O3": 1.03, "O4": 0.17, "O5": 1.60, "O6": 1.23, "O7": 0.021, "O8": 5.35, "O9": 1.15
}  # fmt: skip
SAME_BITS = {"D1": "O2", "D3": "O3"}
"""Figures for bits that do not depend on the batch: the default path has no others."""

console = Console(stderr=True)


def main(
    runs: Annotated[int, typer.Option(help="measured runs of each workload")] = 1,
    tests: Annotated[bool, typer.Option(help="run the tests first")] = True,
    pytest: Annotated[list[str] | None, typer.Option(help="flag of pytest; repeatable: --pytest=-x")] = None,
) -> None:
    """Test and measure this commit on a GPU."""
    began = time.monotonic()
    report: dict[str, Any] = {"commit": _commit(), "gpu": _gpu()}
    if tests:
        report["tests"] = _test(pytest or [])
    rows = [row for ids in (SMALL, LARGE) for row in _measure(ids, runs)]
    report["workloads"] = {row["workload"]: row for row in rows}
    report["workloads"] |= {name: report["workloads"][same] for name, same in SAME_BITS.items()}
    report["seconds"] = round(time.monotonic() - began)
    console.print(_table(rows))
    print(json.dumps(report))
    raise typer.Exit(0 if not tests or report["tests"]["passed"] else 1)


def _test(flags: list[str]) -> dict[str, Any]:
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-m", "pytest", "-m", "gpu", "-q", *TESTS, *flags], check=False)
    return {"passed": done.returncode == 0, "seconds": round(time.monotonic() - began)}


def _measure(ids: tuple[str, ...], runs: int) -> list[dict[str, Any]]:
    """A process for each model, so that its memory is the model's."""
    command = [sys.executable, "-m", "headwater.bench.offline", f"--runs={runs}", "--json"]
    done = subprocess.run([*command, *(f"--workload={name}" for name in ids)], stdout=subprocess.PIPE, check=True)
    rows: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return rows


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table("workload", "seconds", "target", "vLLM 0.23", "faster by", "output tok/s")
    for row in rows:
        name, seconds = row["workload"], row["seconds"]
        faster = f"{PEER_SECONDS[name] / seconds:.2f}x"
        cells = seconds, TARGET_SECONDS[name], PEER_SECONDS[name], faster, row["output_tokens_per_second"]
        table.add_row(name, *map(str, cells))
    return table


def _commit() -> str:
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip()


def _gpu() -> str:
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    typer.run(main)
