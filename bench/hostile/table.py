"""Rows of the neighbour beside each hostile body, with their ratios to the neighbour alone."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from .bodies import ALL_NAMES
from .trial import Beside, Measured

STREAM_GOAL = 1.3
"""Most times as long, at p99, that the first token of a neighbour's stream may take."""
STRUCTURED_GOAL = 2.0
"""The same of a neighbour's structured answer."""
MAX_FAULTS = 3
"""Number of the neighbour's errors that a row keeps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """One kind of the neighbour's requests, in milliseconds: medians over stretches of equal
    length."""

    p50_ms: float
    p99_ms: float
    ratio: float
    """p99 divided by p99 alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The neighbour beside one body."""

    body: str
    answers: dict[str, int]
    """Number of answers that the hostile tenant got, by status."""
    first_token: Figures
    structured: Figures
    settled_seconds: float | None
    """Seconds after the end of the attack until the neighbour was served as before; None: it was
    not, and the deployment was started anew."""
    num_faults: int
    """Number of the neighbour's requests that failed."""
    faults: list[str]
    """The first errors among them."""

    @property
    def is_close(self) -> bool:
        """Whether a goal is missed by times alone, which another measurement may not confirm."""
        is_served = self.settled_seconds is not None and not self.num_faults
        return is_served and not self.is_within_goals

    @property
    def is_within_goals(self) -> bool:
        return (
            self.first_token.ratio <= STREAM_GOAL
            and self.structured.ratio <= STRUCTURED_GOAL
            and not self.num_faults
            and self.settled_seconds is not None
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    requests_per_minute: int
    """Limit of the hostile tenant."""
    seconds: float
    """Length of each stretch."""
    executor: str
    date: str
    commit: str
    cores: str = "2 shared cores"
    """Number of cores of a deployment, and whether clients share them."""
    first_token_alone: Figures
    """The neighbour alone: see `alone_figures`."""
    structured_alone: Figures
    rows: list[Row]
    earlier: dict[str, str] = field(default_factory=dict)
    """Commits of rows that an earlier run measured, by their bodies."""

    def with_rows_of(self, other: Report) -> Report:
        """The report with those rows of an earlier one that it lacks."""
        own = {row.body: row for row in self.rows}
        kept = {row.body: row for row in other.rows if row.body not in own}
        rows = [(own | kept)[body] for body in ALL_NAMES if body in own or body in kept]
        commits = {body: other.earlier.get(body, other.commit) for body in kept}
        return replace(self, rows=rows, earlier=self.earlier | commits)


def report_of(
    measured: Measured,
    *,
    requests_per_minute: int,
    seconds: float,
    executor: str,
    commit: str,
    cores: str,
) -> Report:
    """Report of what was measured today, with rows in the order of the list."""
    first_token = alone_figures([each.ttft for each in measured.alone])
    structured = alone_figures([each.structured for each in measured.alone])
    return Report(
        requests_per_minute=requests_per_minute,
        seconds=seconds,
        executor=executor,
        date=time.strftime("%Y-%m-%d", time.gmtime()),
        commit=commit,
        cores=cores,
        first_token_alone=first_token,
        structured_alone=structured,
        rows=[
            _row(body, measured.beside[body], first_token, structured)
            for body in ALL_NAMES
            if body in measured.beside
        ],
    )


def alone_figures(stretches: Sequence[Sequence[float]]) -> Figures:
    """Figures of the neighbour alone. The ratio is that of the largest p99 of a stretch to the
    median of all: how far equal measurements lie apart."""
    middle = _median_ms(stretches, 99)
    largest = max(_median_ms([each], 99) for each in stretches)
    return _figures(stretches, largest / middle)


def figures(stretches: Sequence[Sequence[float]], alone: Figures) -> Figures:
    return _figures(stretches, _median_ms(stretches, 99) / alone.p99_ms)


def columns_and_lines(report: Report) -> tuple[list[str], list[list[object]]]:
    """The report as a table: times as p50 / p99 in milliseconds."""
    columns = ["body", "its answers", "first token", "×", "structured", "×", "settled", "goals"]
    alone = ["alone", "", *_pair(report.first_token_alone), *_pair(report.structured_alone), "", ""]
    return columns, [alone, *(_line(row) for row in report.rows)]


def _row(body: str, stretches: Sequence[Beside], first_token: Figures, structured: Figures) -> Row:
    answers = Counter[str]()
    for each in stretches:
        answers.update(each.answers)
    settled = [each.settled_seconds for each in stretches if each.settled_seconds is not None]
    faults = [fault for each in stretches for fault in each.latencies.faults]
    return Row(
        body=body,
        answers=dict(answers.most_common()),
        first_token=figures([each.latencies.ttft for each in stretches], first_token),
        structured=figures([each.latencies.structured for each in stretches], structured),
        settled_seconds=max(settled) if len(settled) == len(stretches) else None,
        num_faults=len(faults),
        faults=faults[:MAX_FAULTS],
    )


def _line(row: Row) -> list[object]:
    answers = "  ".join(f"{count} × {status}" for status, count in row.answers.items())
    goals = "met" if row.is_within_goals else f"missed, {row.num_faults} failed"
    return [
        row.body,
        answers,
        *_pair(row.first_token),
        *_pair(row.structured),
        "never" if row.settled_seconds is None else f"{row.settled_seconds:.1f} s",
        goals,
    ]


def _pair(of: Figures) -> tuple[str, float]:
    return f"{of.p50_ms:.0f} / {of.p99_ms:.0f}", of.ratio


def _figures(stretches: Sequence[Sequence[float]], ratio: float) -> Figures:
    return Figures(
        p50_ms=round(_median_ms(stretches, 50), 1),
        p99_ms=round(_median_ms(stretches, 99), 1),
        ratio=round(ratio, 2),
    )


def _median_ms(stretches: Sequence[Sequence[float]], percent: int) -> float:
    """Median over the stretches of a percentile, in milliseconds. NOTE: not the percentile of all
    stretches together, which one pause of the machine's own would set."""
    return float(np.median([np.percentile(each, percent) for each in stretches])) * 1e3
