"""Renders rows of bench/results as pages of Markdown: one of the newest claims, one a topic. Draws
no plots."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from .result_rows import Row, by_series

NOTICE = "<!-- Made by `headwater bench report` from bench/results; a test compares them. -->"


def claims_page(head: str, topics: Mapping[str, Sequence[Row]]) -> str:
    """The newest rows of the series that are claims, a line a section."""
    lines = [
        _claim_line(topic, section, series)
        for topic, rows in topics.items()
        for section, series in claims_of(rows).items()
    ]
    columns = ["claim", "newest figure", "target", "met", "beside", "command", "commit, date"]
    return _page(head, [_table(columns, lines)])


def topic_page(topic: str, head: str, rows: Sequence[Row]) -> str:
    """The newest row of every series by section, in a table of its command; those before it are in
    bench/results alone."""
    parts = [f"![Claims beside their targets and peers]({topic}.svg)\n"]
    for section in dict.fromkeys(row.section for row in rows):
        series = by_series(row for row in rows if row.section == section)
        parts.append(f"## {section}\n")
        for command in dict.fromkeys(each[-1].command for each in series.values()):
            newest = [each[-1] for each in series.values() if each[-1].command == command]
            parts.append(f"`{command}`:\n\n{_rows_table(newest)}")
    return _page(head, parts)


def claims_of(rows: Iterable[Row]) -> dict[str, list[list[Row]]]:
    """Series that are claims, by section, each oldest row first."""
    found: dict[str, list[list[Row]]] = {}
    for (section, *_), series in by_series(rows).items():
        if any(row.claim for row in series):
            found.setdefault(section, []).append(series)
    return found


def names_of(rows: Sequence[Row]) -> list[str]:
    """Names that tell the rows of a claim apart: subject, metric or both."""
    subjects = len({row.what for row in rows}) > 1
    metrics = len({row.metric for row in rows}) > 1
    return [", ".join([row.what] * subjects + [row.metric] * metrics) for row in rows]


def _claim_line(topic: str, section: str, series: Sequence[Sequence[Row]]) -> list[str]:
    rows = [each[-1] for each in series]
    metrics = {row.metric for row in rows}
    figures = [
        f"{name}: {_figure(row)}".removeprefix(": ")
        for name, row in zip(names_of(rows), rows, strict=True)
    ]
    return [
        f"[{section}](benchmarks/{topic}.md#{_anchor(section)})"
        + (f": {metrics.pop()}" if len(metrics) == 1 else ""),
        _stacked(figures),
        _stacked([_target(row) for row in rows]),
        _stacked([row.met for row in rows]),
        _stacked(
            [
                "; ".join(f"{row.median / other:.2f} × {peer}" for peer, other in row.peers.items())
                for row in rows
            ]
        ),
        _stacked(list(dict.fromkeys(f"`{row.command}`" for row in rows))),
        _stacked(list(dict.fromkeys(f"{row.commit}, {row.date}" for row in rows))),
    ]


def _stacked(cells: Sequence[str]) -> str:
    """Lines of one cell; the rows of a claim are level in all cells."""
    return "<br>".join(cells) if any(cells) else ""


def _rows_table(rows: Sequence[Row]) -> str:
    """A table of rows, without the columns that are empty in all of them."""
    cells: dict[str, Sequence[str]] = {
        "what": [row.what for row in rows],
        "metric": [row.metric for row in rows],
        "figure": [_figure(row) for row in rows],
        "target": [_target(row) for row in rows],
        "met": [row.met for row in rows],
        "beside": ["; ".join(_beside(row)) for row in rows],
        "machine": [row.machine for row in rows],
        "commit, date": [f"{row.commit}, {row.date}" for row in rows],
        "note": [row.note for row in rows],
    }
    used = {name: column for name, column in cells.items() if any(column)}
    return _table(list(used), [list(line) for line in zip(*used.values(), strict=True)])


def _beside(row: Row) -> list[str]:
    return [
        f"{peer} {_number(figure)} ({row.median / figure:.2f} ×)"
        for peer, figure in row.peers.items()
    ]


def _figure(row: Row) -> str:
    least = min(row.readings)
    most = max(row.readings)
    readings = _range(least, most)
    interval = "" if row.interval is None else f" (95 %: {_range(*row.interval)})"
    return f"{readings}{interval} {row.unit}".strip()


def _target(row: Row) -> str:
    if row.target is None:
        return ""
    return f"{'≤' if row.better == 'less' else '≥'} {_number(row.target)} {row.unit}".strip()


def _range(least: float, most: float) -> str:
    ends = dict.fromkeys((_number(least), _number(most)))
    return ("–" if least >= 0 else " to ").join(ends)


def _number(value: float) -> str:
    return (f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}").replace("-", "−")


def _anchor(heading: str) -> str:
    """The name that GitHub and the site give a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def _table(columns: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rows = [
        columns,
        ["---"] * len(columns),
        *([cell.replace("|", "&#124;") for cell in line] for line in lines),
    ]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _page(head: str, parts: Sequence[str]) -> str:
    return "\n".join([f"{NOTICE}\n\n{head.strip()}\n", *parts])
