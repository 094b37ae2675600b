"""Measures the time of a cluster from `headwater up` to its first streamed token, and of each of
its stages until it is ready; `--trace` draws what each process did meanwhile.

`python -m headwater.bench.cluster_start`; starts and ends a cluster of its own on free ports. The
model is converted before.
"""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import asdict, dataclass
from typing import Annotated

import httpx
import typer
from rich.console import Console
from rich.table import Table

from headwater.services.stack.cluster_record import ClusterRecord

from .own_cluster import own_cluster
from .processes import cpu_seconds_of_all
from .program import run_program
from .start_timeline import Span, born_at, draw, read_ready, read_timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """One start, in seconds."""

    ready: float
    """Seconds from the command to a cluster that is ready."""
    first_token: float
    """Seconds from the command to the first piece of a streamed answer."""
    answer: float
    """Seconds from the request to that piece; with `--up=--min-replicas=0` an engine starts in
    between."""
    cpu: float
    """Processor seconds of all the cluster's processes up to that piece."""
    stages: dict[str, float]
    """Seconds from the start of a stage's process to its own report that it is ready."""
    timeline: list[Span]


def main(
    rounds: Annotated[int, typer.Option(help="Starts; medians count.")] = 3,
    up: Annotated[
        list[str] | None,
        typer.Option(help="flag of `headwater up`; repeatable: --up=--device=cuda"),
    ] = None,
    trace: Annotated[bool, typer.Option(help="Draw the timeline of the last start.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Seconds from nothing to the first token: `headwater bench start --up=--replicas=1
    --up=--device=cuda`."""
    with Console(stderr=True).status("starting lines"):
        starts = [measure(*(up or ())) for _ in range(rounds)]
    if as_json:
        typer.echo(json.dumps([asdict(start) for start in starts], indent=2))
        return
    table = Table("what", "median s", "least", "most")
    rows = {
        "up to ready": [each.ready for each in starts],
        "up to first token": [each.first_token for each in starts],
    }
    rows["request to first token"] = [each.answer for each in starts]
    rows["processor seconds"] = [each.cpu for each in starts]
    rows |= {
        f"{name} to ready": [each.stages[name] for each in starts] for name in starts[0].stages
    }
    for name, values in rows.items():
        table.add_row(
            name,
            *(f"{value:.2f}" for value in (statistics.median(values), min(values), max(values))),
        )
    console = Console()
    console.print(table)
    if trace:
        console.print(draw(starts[-1].timeline))


def measure(*flags: str) -> Start:
    began = time.monotonic()
    began_at = time.time()
    with own_cluster(flags) as (record, folder):
        ready = time.monotonic() - began
        timeline = read_timeline(record, folder / "logs", began=began_at, ready=ready)
        _first_piece(record)
        first_token = time.monotonic() - began
        cpu = cpu_seconds_of_all(record.pid)
        # From the process's start, as the kernel has it, to the stage's `ready` line.
        logs = ((each, read_ready(folder / "logs" / f"{each.name}.log")) for each in record.stages)
        stages = {
            each.name: at - born_at(each.pid)
            for each, at in logs
            if at is not None and "grpc" in each.addresses
        }
    answer = first_token - ready
    return Start(
        ready=ready,
        first_token=first_token,
        answer=answer,
        cpu=cpu,
        stages=stages,
        timeline=timeline,
    )


def _first_piece(record: ClusterRecord) -> None:
    body = {
        "model": record.model,
        "messages": [{"role": "user", "content": "What is a headwater?"}],
        "stream": True,
    }
    with httpx.stream("POST", f"{record.rest}/v1/chat/completions", json=body, timeout=60) as reply:
        for line in reply.iter_lines():
            if '"content":"' in line and '"content":""' not in line:
                return


if __name__ == "__main__":
    run_program(main)
