"""Rows of bench/results: one measured figure each. Reads, checks and appends them; does not render
them."""

from __future__ import annotations

import datetime
import math
import re
import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Literal

import msgspec

Text = Annotated[str, msgspec.Meta(min_length=1)]
COMMIT = re.compile(r"[0-9a-f]{7,40}")
Readings = Annotated[list[float], msgspec.Meta(min_length=1)]


class RowError(Exception):
    """A row that is invalid, or that cannot be added; says where and why."""


class Row(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """One measured figure. Rows of one section, subject and metric are a series; its newest row is
    what counts."""

    date: datetime.date
    commit: str
    """The commit that was measured, as git abbreviates it."""
    machine: Text
    """A name that the topic's page explains, and what else ran there."""
    section: Text
    """Heading on the topic's page; a line of the newest claims if a series of it is a claim."""
    what: Text
    command: Text
    """Command that repeats the measurement, as one would type it."""
    metric: Text
    unit: str
    """Empty of counts and shares."""
    value: float | Readings
    """One reading, or several: runs in turn, or the least and the most."""
    interval: tuple[float, float] | None = None
    """Ends of the 95 % interval of a mean or median."""
    better: Literal["less", "more"] = "less"
    target: float | None = None
    peers: dict[str, float] = {}
    """The same figure of other programs or of other versions, by name, from the same conditions."""
    claim: bool = False
    """Whether the series stands on the page of newest claims."""
    note: str = ""

    def __post_init__(self) -> None:
        if COMMIT.fullmatch(self.commit) is None:
            raise ValueError(
                f"commit is {self.commit!r}; allowed: 7 to 40 hexadecimal digits of a commit "
                "without changes"
            )

    @property
    def series(self) -> tuple[str, str, str]:
        return self.section, self.what, self.metric

    @property
    def readings(self) -> list[float]:
        return self.value if isinstance(self.value, list) else [self.value]

    @property
    def median(self) -> float:
        return statistics.median(self.readings)

    @property
    def met(self) -> Literal["yes", "no", "in part", ""]:
        """Whether the readings, or the end of the interval, are as good as the target; empty
        without one."""
        if self.target is None:
            return ""
        figures = self.readings
        if self.interval is not None:
            figures = [self.interval[1] if self.better == "less" else self.interval[0]]
        good = [
            each <= self.target if self.better == "less" else each >= self.target
            for each in figures
        ]
        return "yes" if all(good) else "in part" if any(good) else "no"

    def ratio(self, other: float) -> float:
        """Time as a share of the other's: less than one is better, also where more of the unit
        is."""
        ours, theirs = (self.median, other) if self.better == "less" else (other, self.median)
        return ours / theirs if theirs else math.inf


def read_rows(path: Path) -> list[Row]:
    """Rows of a topic. Raises `RowError` with file and line for one that does not fit the
    schema."""
    rows = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            rows.append(msgspec.json.decode(line, type=Row))
        except msgspec.DecodeError as error:
            raise RowError(f"{path.name}:{number}: {error}") from None
    return rows


def by_series(rows: Iterable[Row]) -> dict[tuple[str, str, str], list[Row]]:
    """Rows of each series, oldest first; of one day, in the order of the file."""
    found: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        found.setdefault(row.series, []).append(row)
    return {series: sorted(each, key=lambda row: row.date) for series, each in found.items()}


def append_row(path: Path, fields: Mapping[str, object]) -> Row:
    """Adds a row at the end of a topic. Raises `RowError` for fields that do not fit the schema."""
    try:
        row = msgspec.convert(fields, Row)
    except msgspec.ValidationError as error:
        raise RowError(f"not added to {path.name}: {error}") from None
    with path.open("ab") as file:
        file.write(msgspec.json.encode(row) + b"\n")
    return row
