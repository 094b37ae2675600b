"""Rows of the neighbour beside each hostile body, with their ratios to the neighbour alone."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .trial import Beside, Measured

STREAM_GOAL = 1.3
"""Most times as long, at p99, that the first token of a neighbour's stream may take."""
STRUCTURED_GOAL = 2.0
"""The same of a neighbour's structured answer."""
MAX_FAULTS = 3
"""Number of the neighbour's errors that a row keeps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """One kind of the neighbour's requests beside one body, in milliseconds."""

    p50_ms: float
    p99_ms: float
    ratio: float
    """p99 beside the body, divided by p99 alone."""


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
    first_token_alone: Figures
    """The neighbour alone: see `alone_figures`."""
    structured_alone: Figures
    rows: list[Row]


def report_of(
    measured: Measured, *, requests_per_minute: int, seconds: float, executor: str, commit: str
) -> Report:
    """Report of what was measured today."""
    first_token = alone_figures([each.ttft for each in measured.alone])
    structured = alone_figures([each.structured for each in measured.alone])
    return Report(
        requests_per_minute=requests_per_minute,
        seconds=seconds,
        executor=executor,
        date=time.strftime("%Y-%m-%d", time.gmtime()),
        commit=commit,
        first_token_alone=first_token,
        structured_alone=structured,
        rows=[_row(each, first_token, structured) for each in measured.beside],
    )


def alone_figures(stretches: Sequence[Sequence[float]]) -> Figures:
    """Medians over the stretches of their percentiles: a stretch alone has as many requests as one
    beside a body, and one pause of the machine's own moves no other figure. The ratio is that of
    the largest p99 of a stretch to this median: how far equal measurements lie apart."""
    p99 = [_milliseconds(each, 99) for each in stretches]
    middle = float(np.median(p99))
    return Figures(
        p50_ms=round(float(np.median([_milliseconds(each, 50) for each in stretches])), 1),
        p99_ms=middle,
        ratio=round(max(p99) / middle, 2),
    )


def figures(beside: Sequence[float], alone: Figures) -> Figures:
    p99 = _milliseconds(beside, 99)
    return Figures(p50_ms=_milliseconds(beside, 50), p99_ms=p99, ratio=round(p99 / alone.p99_ms, 2))


def columns_and_lines(report: Report) -> tuple[list[str], list[list[object]]]:
    """The report as a table: times as p50 / p99 in milliseconds."""
    columns = ["body", "its answers", "first token", "×", "structured", "×", "settled", "goals"]
    alone = ["alone", "", *_pair(report.first_token_alone), *_pair(report.structured_alone), "", ""]
    return columns, [alone, *(_line(row) for row in report.rows)]


def _row(beside: Beside, first_token: Figures, structured: Figures) -> Row:
    faults = beside.latencies.faults
    return Row(
        body=beside.name,
        answers=dict(beside.answers.most_common()),
        first_token=figures(beside.latencies.ttft, first_token),
        structured=figures(beside.latencies.structured, structured),
        settled_seconds=beside.settled_seconds,
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


def _milliseconds(seconds: Sequence[float], percent: int) -> float:
    return round(float(np.percentile(seconds, percent)) * 1e3, 1)
