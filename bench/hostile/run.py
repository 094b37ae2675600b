"""One run: deployments of two replicas, and the hostile bodies beside a neighbour on them."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import secrets
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import typer

from ..own_cluster import own_cluster, wait_until_prepared
from .attacker import attacker
from .bodies import NAMES
from .cores import Cores, going_first, groups_of, running_on
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
    limit: float
    """Seconds after which no stretch beside a body begins."""
    executor: str
    model: str
    """Folder of the model; empty: the demo model."""
    commit: str

    def report(self, names: Sequence[str]) -> Report:
        groups = groups_of(sorted(os.sched_getaffinity(0)))[: len(names)]
        measured = Measured()
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(len(groups), spawn) as pool:
            parts = [names[i :: len(groups)] for i in range(len(groups))]
            for part in pool.map(self._measured, parts, groups):
                measured.add(part)
        return self._report(measured, groups[0])

    def _report(self, measured: Measured, cores: Cores) -> Report:
        return report_of(
            measured,
            requests_per_minute=self.requests_per_minute,
            seconds=self.seconds,
            executor=self.executor,
            commit=self.commit,
            cores=cores.description,
        )

    def _measured(self, names: Sequence[str], cores: Cores) -> Measured:
        """Each body once, and those that miss a goal again."""
        measured = Measured()
        end = time.monotonic() + self.limit
        os.environ["HEADWATER_SIMULATED_STEP_SECONDS"] = SIMULATED_STEP_SECONDS
        with (
            running_on(cores.neighbour),
            attacker(cores.attacker) as process,
            contextlib.ExitStack() as deployed,
        ):
            trial = None
            left = names
            for _ in range(1 + MORE_STRETCHES):
                while left:
                    if trial is None or not trial.serves:
                        deployed.close()
                        trial = deployed.enter_context(self._deployed(cores, process))
                    with going_first():
                        num_over = asyncio.run(trial.run(left, measured, show_progress, end))
                    left = left[num_over:]
                if time.monotonic() > end:
                    break
                rows = self._report(measured, cores).rows
                left = [row.body for row in rows if row.is_close and row.body in NAMES]
        return measured

    @contextlib.contextmanager
    def _deployed(self, cores: Cores, attacker: ProcessPoolExecutor) -> Iterator[Trial]:
        """A new deployment."""
        admin_key = secrets.token_urlsafe()
        os.environ["HEADWATER_ADMIN_KEY"] = admin_key
        flags = ["--replicas=2", "--device=cpu", "--log-level=error", f"--executor={self.executor}"]
        if self.model:
            flags.append(f"--model={self.model}")
        with contextlib.ExitStack() as stack:
            with running_on(cores.deployment):
                cluster, _ = stack.enter_context(own_cluster(flags))
            wait_until_prepared(cluster, PREPARED_SECONDS)
            yield Trial(
                cluster,
                admin_key,
                attacker,
                seconds=self.seconds,
                requests_per_minute=self.requests_per_minute,
            )


def show_progress(name: str, beside: Beside) -> None:
    """Prints a line on stderr: a run takes minutes."""
    slowest = max(beside.latencies.ttft) * 1e3
    typer.echo(f"{name}: {dict(beside.answers)}, slowest stream {slowest:.0f} ms", err=True)
