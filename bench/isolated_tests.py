"""Runs tests so that each gets a verdict of its own, even where another test breaks the process
that both run in.

All run together first. Tests that failed or were not reached run again, each alone in a fresh
process.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .part import TOO_LATE, run_part

CRASHED = "crashed"
"""Phase of a test whose worker ended while it ran, in the lines of `pytest_results`."""
EXIT_FAILED = "failed with 1"
"""pytest's exit code after tests that failed."""


@dataclass(slots=True)
class Results:
    """Report of one run of pytest."""

    collected: list[str] = field(default_factory=list)
    broken: dict[str, str] = field(default_factory=dict)
    """Files that cannot be collected, with the first line of the error."""
    outcomes: dict[str, str] = field(default_factory=dict)
    """passed, failed or skipped, for tests whose run was over."""
    errors: dict[str, str] = field(default_factory=dict)
    """First line of the first error of each test that failed."""
    culprits: set[str] = field(default_factory=set)
    """Tests that ended their process or left it unusable."""
    started: set[str] = field(default_factory=set)
    victims: dict[str, str] = field(default_factory=dict)
    """Tests that failed in a process after a culprit, with that culprit."""

    @classmethod
    def read(cls, path: Path) -> Results:
        """Reads a file of `pytest_results`, whole or cut off; a missing file gives no results."""
        results = cls()
        culprit_of_worker = dict[str, str]()
        for line in path.read_text().splitlines() if path.exists() else ():
            try:
                report = json.loads(line)
            except json.JSONDecodeError:
                break
            if "collected" in report:
                results.collected = report["collected"]
            elif "broken" in report:
                results.broken[report["broken"]] = report["error"]
            elif "started" in report:
                results.started.add(report["started"])
            else:
                results._note(report, culprit_of_worker)
        return results

    def _note(self, report: dict[str, Any], culprit_of_worker: dict[str, str]) -> None:
        name = report["id"]
        phase = report["phase"]
        outcome = report["outcome"]
        worker = report["worker"]
        if outcome == "failed":
            self.errors.setdefault(name, report["error"])
            if (culprit := culprit_of_worker.get(worker, name)) != name:
                self.victims[name] = culprit
        if report["poisoned"] or phase == CRASHED:
            self.culprits.add(name)
            culprit_of_worker.setdefault(worker, name)
        if phase in ("teardown", CRASHED):
            self.outcomes[name] = (
                "failed" if name in self.errors else self.outcomes.get(name, "passed")
            )
        elif outcome == "skipped":
            self.outcomes[name] = outcome


@dataclass(slots=True, kw_only=True)
class Verdicts:
    """The verdicts on all tests, as a report shows them."""

    green: bool = False
    passed: int = 0
    failed: int = 0
    """Ids in `failures` and `failed_together`."""
    skipped: int = 0
    run_again: int = 0
    failures: dict[str, str] = field(default_factory=dict)
    """First line of the error of each test that fails alone too, or was not run again."""
    failed_together: dict[str, str] = field(default_factory=dict)
    """First line of the error of each test that failed beside others and passes alone."""
    notes: dict[str, str] = field(default_factory=dict)
    """Reasons for which tests that passed were run again."""
    not_run: list[str] = field(default_factory=list)
    seconds: float = 0.0
    why: str = ""
    """The way the run of all tests ended, if not as pytest ends."""

    def plain(self) -> dict[str, Any]:
        return asdict(self)


class IsolatedTests:
    """One run of all tests, and then of some again, within a limit of time."""

    def __init__(
        self, selected: Sequence[str], limit: float, *, num_processes: int, cwd: Path | None = None
    ) -> None:
        """`selected`: arguments of pytest for the run of all tests. `num_processes`: how many tests
        are run again at once."""
        self._selected = selected
        self._num_processes = num_processes
        self._cwd = cwd
        self._began = time.monotonic()
        self._end = self._began + limit

    def run(self) -> Verdicts:
        with tempfile.TemporaryDirectory(prefix="headwater-tests-") as folder:
            together, why = self._pytest(self._selected, Path(folder) / "all")
            unsettled = [
                name
                for name in together.collected
                if together.outcomes.get(name) in (None, "failed")
            ]
            # Tests without any verdict come first: time may not last for all.
            unsettled.sort(key=lambda name: name in together.outcomes)
            files = [Path(folder) / str(i) for i in range(len(unsettled))]
            with ThreadPoolExecutor(self._num_processes) as pool:
                alone = dict(zip(unsettled, pool.map(self._alone, unsettled, files), strict=True))
        verdicts = judge(together, alone)
        verdicts.why = "" if why == EXIT_FAILED or why.startswith(f"{EXIT_FAILED}:") else why
        verdicts.seconds = round(time.monotonic() - self._began, 1)
        return verdicts

    def collect(self) -> tuple[list[str], str]:
        """Tests that would run, and the reason why there are none or not all."""
        with tempfile.TemporaryDirectory(prefix="headwater-tests-") as folder:
            results, why = self._pytest([*self._selected, "--collect-only"], Path(folder) / "all")
        return results.collected, why

    def _alone(self, name: str, path: Path) -> tuple[str, str] | None:
        """(outcome, first line of its error) of a test in a process of its own; None: there was no
        time."""
        results, why = self._pytest([name], path)
        if name in results.outcomes:
            return results.outcomes[name], results.errors.get(name, "")
        return None if why == TOO_LATE else ("failed", f"its process {why}")

    def _pytest(self, arguments: Iterable[str], path: Path) -> tuple[Results, str]:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "headwater.bench.pytest_results"]
        outcome = run_part(
            [*command, f"--results-file={path}", *arguments],
            self._end - time.monotonic(),
            cwd=self._cwd,
        )
        return Results.read(path), outcome.why


def judge(together: Results, alone: dict[str, tuple[str, str] | None]) -> Verdicts:
    """Verdicts. `alone` has the results of those that failed together or were not reached."""
    verdicts = Verdicts(
        failures=dict(together.broken), run_again=sum(ended is not None for ended in alone.values())
    )
    for name in together.collected:
        outcome = together.outcomes.get(name, "")
        error = together.errors.get(name, "")
        if name in alone:
            _judge_again(verdicts, together, name, alone[name])
        elif outcome == "skipped":
            verdicts.skipped += 1
        else:
            assert outcome == "passed", (name, outcome, error)
            verdicts.passed += 1
    verdicts.failed = len(verdicts.failures) + len(verdicts.failed_together)
    verdicts.green = bool(together.collected) and not (verdicts.failed or verdicts.not_run)
    return verdicts


def _judge_again(
    verdicts: Verdicts, together: Results, name: str, ended: tuple[str, str] | None
) -> None:
    error = together.errors.get(name, "")
    if ended is None:
        if error:
            verdicts.failures[name] = f"{error} (not run again: {TOO_LATE})"
        else:
            verdicts.not_run.append(name)
        return
    outcome, error_alone = ended
    if outcome == "failed":
        verdicts.failures[name] = error_alone
    elif outcome == "skipped":
        verdicts.skipped += 1
    elif name in together.started and (name in together.culprits or name not in together.victims):
        verdicts.failed_together[name] = error or "its process ended"
    else:
        culprit = together.victims.get(name)
        verdicts.notes[name] = (
            f"passed alone; {f'failed behind {culprit}' if culprit else 'was not reached'}"
        )
        verdicts.passed += 1
