"""Runs of a simulation by seeds, one after another."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Annotated, TypeVar

import typer

OutcomeT = TypeVar("OutcomeT")
Seeds = Annotated[int, typer.Option(help="how many")]
First = Annotated[int, typer.Option(help="the first of them")]


def run_seeds(
    run_seed: Callable[[int], OutcomeT],
    first: int,
    seeds: int,
    summary: Callable[[list[OutcomeT]], str] | None = None,
) -> None:
    """Runs seeds; prints the time that they took, and the `summary` of their outcomes. Raises
    `SystemExit` that names the first seed that breaks."""
    began = time.process_time()
    outcomes = list[OutcomeT]()
    for seed in range(first, first + seeds):
        try:
            outcomes.append(run_seed(seed))
        except AssertionError as broken:
            raise SystemExit(f"seed {seed}: {broken}") from broken
    counts = "" if summary is None else f": {summary(outcomes)}"
    print(f"{seeds} seeds in {time.process_time() - began:.1f} s of a core{counts}")


def breaks(run_seed: Callable[[int], object], seed: int) -> bool:
    """Whether the seed breaks. An engine whose blocks are taken twice may fail in a list of its
    own."""
    try:
        run_seed(seed)
    except (AssertionError, IndexError):
        return True
    return False
