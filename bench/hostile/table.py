"""What the neighbour noticed: a row for each hostile body, and their ratios to the neighbour
alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from .neighbour import Latencies
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
    """All stretches alone together; the ratio is that of the worst among them to all."""
    structured_alone: Figures
    rows: list[Row]


def rows_of(measured: Measured) -> list[Row]:
    alone = pooled(measured.alone)
    return [_row(each, alone) for each in measured.beside]


def alone_figures(stretches: Sequence[Sequence[float]]) -> Figures:
    """Figures of all stretches together. The ratio is the largest p99 of one to that of all: how
    far two equal measurements lie apart."""
    whole = [seconds for each in stretches for seconds in each]
    ratio = max(figures(each, whole).ratio for each in stretches)
    return Figures(p50_ms=_milliseconds(whole, 50), p99_ms=_milliseconds(whole, 99), ratio=ratio)


def figures(beside: Sequence[float], alone: Sequence[float]) -> Figures:
    ratio = float(np.percentile(beside, 99) / np.percentile(alone, 99))
    return Figures(
        p50_ms=_milliseconds(beside, 50), p99_ms=_milliseconds(beside, 99), ratio=round(ratio, 2)
    )


def pooled(stretches: Iterable[Latencies]) -> Latencies:
    whole = Latencies()
    for each in stretches:
        whole.add(each)
    return whole


def columns_and_lines(report: Report) -> tuple[list[str], list[list[object]]]:
    """The report as a table: times as p50 / p99 in milliseconds."""
    columns = ["body", "its answers", "first token", "×", "structured", "×", "settled", "goals"]
    alone = ["alone", "", *_pair(report.first_token_alone), *_pair(report.structured_alone), "", ""]
    return columns, [alone, *(_line(row) for row in report.rows)]


def _row(beside: Beside, alone: Latencies) -> Row:
    faults = beside.latencies.faults
    return Row(
        body=beside.name,
        answers=dict(beside.answers.most_common()),
        first_token=figures(beside.latencies.ttft, alone.ttft),
        structured=figures(beside.latencies.structured, alone.structured),
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
