"""The section of docs/costly_requests.md on hostile bodies, rendered from the results beside it."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping

import msgspec

from ..source_version import ROOT
from .bodies import BODIES, CONTROLS
from .table import STREAM_GOAL, STRUCTURED_GOAL, Figures, Report, Row

PAGE = ROOT / "docs/costly_requests.md"
RESULTS = ROOT / "docs/hostile_bodies.json"
BEGIN = "<!-- `headwater bench hostile --write` writes what follows -->\n"
END = "<!-- end of what it writes -->\n"
NOT_MEASURED = "–"
LINE_LEN = 120
"""Characters of a line of prose."""

Reports = dict[str, Report]
"""Reports by the names of keys."""


class NoPlace(Exception):
    """The page has no place for the table."""


def read_reports() -> Reports:
    return msgspec.json.decode(RESULTS.read_bytes(), type=Reports) if RESULTS.exists() else {}


def write(measured: Reports) -> None:
    """Replaces what was measured in the results, and the table of the page. Rows that a report
    lacks, and keys without a report, stay as they were."""
    reports = read_reports()
    for name, report in measured.items():
        reports[name] = report.with_rows_of(reports[name]) if name in reports else report
    RESULTS.write_bytes(msgspec.json.format(msgspec.json.encode(reports), indent=1) + b"\n")
    PAGE.write_text(with_table(PAGE.read_text(), reports))


def with_table(page: str, reports: Mapping[str, Report]) -> str:
    """The page with a new table between the two comments. Raises `NoPlace`."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise NoPlace(f"{PAGE.name} lacks the line {BEGIN.strip()} or {END.strip()}")
    return f"{before}{BEGIN}\n{table(reports)}\n{END}{after}"


def table(reports: Mapping[str, Report]) -> str:
    """A line for each control and each body that was measured, with two cells for each key; below
    it, what was measured when, and what was not."""
    names = list(reports)
    heads = [f"first token, {name} key | structured, {name} key" for name in names]
    lines = [
        f"| body | what it is | {' | '.join(heads)} |",
        f"|---|---|{'---|---|' * len(names)}",
        _line("", "nothing", [_alone(report) for report in reports.values()]),
    ]
    by_name = [{row.body: row for row in report.rows} for report in reports.values()]
    missing = []
    for body in (*CONTROLS, *BODIES):
        if not any(body.name in rows for rows in by_name):
            missing.append(f"`{body.name}`")
            continue
        has_goals = body not in CONTROLS
        found = [_cells(rows.get(body.name), has_goals=has_goals) for rows in by_name]
        lines.append(_line(f"`{body.name}`", body.what, found))
    notes = [*map(_measured, reports.items())]
    for name, report in reports.items():
        notes += _earlier(name, report)
    if missing:
        notes.append(f"- Not measured yet: {', '.join(missing)}.")
    return "\n".join([*lines, "", *map(_wrapped, notes), ""])


def _line(name: str, what: str, cells: list[str]) -> str:
    return f"| {name} | {what} | {' | '.join(cells)} |"


def _alone(report: Report) -> str:
    alone = (report.first_token_alone, report.structured_alone)
    return " | ".join(f"{_cell(each)}, {each.p99_ms:,.0f} ms" for each in alone)


def _cells(row: Row | None, *, has_goals: bool) -> str:
    if row is None:
        return f"{NOT_MEASURED} | {NOT_MEASURED}"
    faults = f", {row.num_faults} failed" if row.num_faults else ""
    if not has_goals:
        return f"{_cell(row.first_token)} | {_cell(row.structured)}{faults}"
    first_token = _cell(row.first_token, STREAM_GOAL)
    return f"{first_token} | {_cell(row.structured, STRUCTURED_GOAL)}{faults}"


def _cell(of: Figures, goal: float = float("inf")) -> str:
    return f"**{of.ratio:.2f}**" if of.ratio > goal else f"{of.ratio:.2f}"


def _measured(named: tuple[str, Report]) -> str:
    name, report = named
    return (
        f"- The {name} key has {report.requests_per_minute:,} requests a minute: {report.date}, "
        f"{report.commit}, executor `{report.executor}`, {report.seconds:g} s a body, "
        f"{report.cores}."
    )


def _earlier(name: str, report: Report) -> Iterator[str]:
    """Notes on rows that earlier runs measured."""
    for commit in dict.fromkeys(report.earlier.values()):
        bodies = [f"`{body}`" for body, of in report.earlier.items() if of == commit]
        yield f"- Measured with the {name} key at {commit}: {', '.join(bodies)}."


def _wrapped(note: str) -> str:
    return textwrap.fill(note, LINE_LEN, subsequent_indent="  ", break_on_hyphens=False)
