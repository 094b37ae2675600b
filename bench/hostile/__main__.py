"""`headwater bench hostile`: what a neighbour notices of each hostile body of a list, on a
deployment of two replicas that it starts."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
from dataclasses import asdict
from functools import partial
from typing import Annotated

import typer

from ..figures import AsJson, print_table
from ..own_cluster import own_cluster, wait_until_prepared
from ..program import check_choice, run_program
from ..source_version import source_version
from . import page
from .attacker import attacker
from .bodies import NAMES
from .table import columns_and_lines, report_of
from .trial import Beside, Measured, Trial

KEYS = {"small": 2, "generous": 6000}
"""Requests a minute of the hostile tenant."""
EXECUTORS = ("single", "simulated")
SIMULATED_STEP_SECONDS = "0.01"
PREPARED_SECONDS = 60.0
MORE_STRETCHES = 2
"""Number of times that a body which misses a goal is measured again; medians count."""


def main(
    bodies: Annotated[
        str, typer.Option(help="names, with commas between them; default: all", metavar="NAME,…")
    ] = "",
    key: Annotated[str, typer.Option(help=f"of the hostile tenant: {' or '.join(KEYS)}")] = "small",
    seconds: Annotated[float, typer.Option(help="of each body", min=1.0)] = 6.0,
    executor: Annotated[
        str, typer.Option(help="of the two engines: single (the demo model) or simulated")
    ] = "single",
    *,
    write: Annotated[
        bool, typer.Option(help="put the results into docs/security.md; takes the whole list")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """A neighbour's time to first token, and to a structured answer, beside each hostile body."""
    check_choice("--key", key, KEYS)
    check_choice("--executor", executor, EXECUTORS)
    names = bodies.split(",") if bodies else list(NAMES)
    for name in names:
        check_choice("--bodies", name, NAMES)
    if write and bodies:
        raise typer.BadParameter("--write replaces the whole table; leave out --bodies")
    make_report = partial(
        report_of,
        requests_per_minute=KEYS[key],
        seconds=seconds,
        executor=executor,
        commit=source_version(),
    )
    measured = Measured()
    measure(names, measured, executor, seconds=seconds, requests_per_minute=KEYS[key])
    for _ in range(MORE_STRETCHES):
        if close := [row.body for row in make_report(measured).rows if row.is_close]:
            measure(close, measured, executor, seconds=seconds, requests_per_minute=KEYS[key])
    report = make_report(measured)
    if write:
        page.note(key, report)
    if as_json:
        print(json.dumps(asdict(report)))
    else:
        print_table(*columns_and_lines(report))


def measure(
    names: list[str],
    measured: Measured,
    executor: str,
    *,
    seconds: float,
    requests_per_minute: int,
) -> None:
    """Measures each body once on a deployment of its own, and on another one after a body that took
    it down."""
    admin_key = secrets.token_urlsafe()
    os.environ["HEADWATER_ADMIN_KEY"] = admin_key
    os.environ["HEADWATER_SIMULATED_STEP_SECONDS"] = SIMULATED_STEP_SECONDS
    flags = [f"--executor={executor}", "--replicas=2", "--device=cpu", "--log-level=error"]
    left = names
    with attacker() as process:
        while left:
            with own_cluster(flags) as (cluster, _):
                wait_until_prepared(cluster, PREPARED_SECONDS)
                trial = Trial(
                    cluster,
                    admin_key,
                    process,
                    seconds=seconds,
                    requests_per_minute=requests_per_minute,
                )
                left = left[asyncio.run(trial.run(left, measured, show_progress)) :]


def show_progress(name: str, beside: Beside) -> None:
    """Prints a line on stderr: a run takes minutes."""
    slowest = max(beside.latencies.ttft) * 1e3
    typer.echo(f"{name}: {dict(beside.answers)}, slowest stream {slowest:.0f} ms", err=True)


if __name__ == "__main__":
    run_program(main)
