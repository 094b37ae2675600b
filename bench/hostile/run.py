"""One run: deployments of two replicas, and the hostile bodies beside a neighbour on them."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import typer

from ..own_cluster import own_cluster, wait_until_prepared
from .attacker import attacker
from .table import Report, report_of
from .trial import Beside, Measured, Trial

SIMULATED_STEP_SECONDS = "0.01"
PREPARED_SECONDS = 60.0
MORE_STRETCHES = 2
"""Number of times that a body which misses a goal is measured again; medians count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    requests_per_minute: int
    """Limit of the hostile tenant."""
    seconds: float
    """Length of each stretch."""
    executor: str
    commit: str

    def report(self, names: Sequence[str]) -> Report:
        measured = Measured()
        self._measure(names, measured)
        for _ in range(MORE_STRETCHES):
            if close := [row.body for row in self._report(measured).rows if row.is_close]:
                self._measure(close, measured)
        return self._report(measured)

    def _report(self, measured: Measured) -> Report:
        return report_of(
            measured,
            requests_per_minute=self.requests_per_minute,
            seconds=self.seconds,
            executor=self.executor,
            commit=self.commit,
        )

    def _measure(self, names: Sequence[str], measured: Measured) -> None:
        """Measures each body once, on a new deployment, and on another one after a body that took
        it down."""
        admin_key = secrets.token_urlsafe()
        os.environ["HEADWATER_ADMIN_KEY"] = admin_key
        os.environ["HEADWATER_SIMULATED_STEP_SECONDS"] = SIMULATED_STEP_SECONDS
        flags = ["--replicas=2", "--device=cpu", "--log-level=error", f"--executor={self.executor}"]
        left = names
        with attacker() as process:
            while left:
                with own_cluster(flags) as (cluster, _):
                    wait_until_prepared(cluster, PREPARED_SECONDS)
                    trial = Trial(
                        cluster,
                        admin_key,
                        process,
                        seconds=self.seconds,
                        requests_per_minute=self.requests_per_minute,
                    )
                    left = left[asyncio.run(trial.run(left, measured, show_progress)) :]


def show_progress(name: str, beside: Beside) -> None:
    """Prints a line on stderr: a run takes minutes."""
    slowest = max(beside.latencies.ttft) * 1e3
    typer.echo(f"{name}: {dict(beside.answers)}, slowest stream {slowest:.0f} ms", err=True)
