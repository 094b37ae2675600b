"""`headwater bench hostile`: what a neighbour notices of each hostile body of a list, on a
deployment of two replicas that it starts."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import Annotated

import typer

from ..figures import AsJson, print_table
from ..program import check_choice, run_program
from ..source_version import source_version
from . import page
from .bodies import ALL_NAMES
from .run import Run
from .table import columns_and_lines

KEYS = {"small": 2, "generous": 6000}
"""Requests a minute of the hostile tenant."""
EXECUTORS = ("single", "simulated")


def main(
    bodies: Annotated[
        str, typer.Option(help="names, with commas between them; default: all", metavar="NAME,…")
    ] = "",
    key: Annotated[
        str,
        typer.Option(
            help=f"of the hostile tenant: {' or '.join(KEYS)}; default: small, or each with --write"
        ),
    ] = "",
    seconds: Annotated[float, typer.Option(help="of each body", min=1.0)] = 6.0,
    limit: Annotated[
        float, typer.Option(help="seconds, with each key, after which no other body begins")
    ] = math.inf,
    executor: Annotated[
        str, typer.Option(help="of the two engines: single (the demo model) or simulated")
    ] = "single",
    model: Annotated[
        str, typer.Option(help="folder of a model; default: the demo model", metavar="FOLDER")
    ] = "",
    *,
    write: Annotated[
        bool, typer.Option(help="write what was measured, a key at a time, to the documentation")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """A neighbour's time to first token, and to a structured answer, beside each hostile body."""
    keys = [key] if key else list(KEYS) if write else ["small"]
    for each in keys:
        check_choice("--key", each, KEYS)
    check_choice("--executor", executor, EXECUTORS)
    names = bodies.split(",") if bodies else list(ALL_NAMES)
    for name in names:
        check_choice("--bodies", name, ALL_NAMES)
    commit = source_version()
    reports = {}
    for each in keys:
        run = Run(
            requests_per_minute=KEYS[each],
            seconds=seconds,
            limit=limit,
            executor=executor,
            model=model,
            commit=commit,
        )
        reports[each] = run.report(names)
        if write:
            page.write({each: reports[each]})
    if as_json:
        print(json.dumps({name: asdict(report) for name, report in reports.items()}))
        return
    for report in reports.values():
        print_table(*columns_and_lines(report))


if __name__ == "__main__":
    run_program(main)
