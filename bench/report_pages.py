"""Renders rows of bench/results as pages of Markdown: one of the newest claims, one a topic. Draws
no plots."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from .result_rows import COMMIT, Row, by_series

RUNNERS = ("headwater ", "python -m ", "pytest ")
"""Programs that commands of figures begin with."""
RETIRED = ("--gemv", "--decode-steps")
"""Flags that commands of earlier commits have."""
EARLIER_FORMS = ("before", "in two launches", "without the fence", "without touching", "512 seats")
"""Peers that are earlier forms of Headwater: they tell what a change gained, which readers of the
page need not know."""
OWN_FORMS = (
    *("bf16", "int4, groups of 32", "int4, groups of 128", "computed again", "memory's limit"),
    *("replay", "round robin", "best of nine", "SGLang, older policy"),
)
"""Peers that are Headwater under other settings. A figure that is compared with these alone is in
the rows, not on a page."""
NOTICE = "<!-- Made by `headwater bench report` from bench/results; a test compares them. -->"


def claims_page(head: str, topics: Mapping[str, Sequence[Row]]) -> str:
    """The newest rows of the series that are claims, a line a section."""
    lines = [
        _claim_line(topic, section, series)
        for topic, rows in topics.items()
        for section, series in claims_of(rows).items()
    ]
    columns = ["claim", "newest figure", "target", "met", "beside"]
    return _page(head, [_table(columns, lines)])


def topic_page(topic: str, head: str, rows: Sequence[Row]) -> str:
    """The newest figure of every series that a command repeats and that is compared with a target
    or a peer, by section, in a table of its command. Notes and all other figures are in
    bench/results alone."""
    parts = [f"![Claims beside their targets and peers]({topic}.svg)\n"]
    newest = [
        series[-1]
        for series in by_series(rows).values()
        if is_repeatable(series[-1]) and is_compared(series[-1])
    ]
    for section in dict.fromkeys(row.section for row in newest):
        parts.append(f"## {section}\n")
        found = [row for row in newest if row.section == section]
        for command in dict.fromkeys(row.command for row in found):
            parts.append(_figures_table(command, [row for row in found if row.command == command]))
    return _page(head, parts)


def is_repeatable(row: Row) -> bool:
    """Whether its command can be typed by a reader."""
    is_program = row.command.startswith(RUNNERS) and "script" not in row.command
    return is_program and not any(flag in row.command for flag in RETIRED)


def is_compared(row: Row) -> bool:
    """Whether a reader sees what the figure means: a claim, or one with a target or a peer, unless
    it was measured to compare a commit with another."""
    names_commit = any(COMMIT.fullmatch(word) for word in re.split(r"\W+", row.metric))
    if names_commit or " in turn with " in row.what:
        return False
    peers = row.peers.keys() - {*EARLIER_FORMS, *OWN_FORMS}
    is_beside = any(COMMIT.fullmatch(peer) is None for peer in peers)
    return row.claim or row.target is not None or is_beside


def claims_of(rows: Iterable[Row]) -> dict[str, list[list[Row]]]:
    """Series that are claims, by section, each oldest row first."""
    found: dict[str, list[list[Row]]] = {}
    for (section, *_), series in by_series(rows).items():
        if any(row.claim for row in series):
            found.setdefault(section, []).append(series)
    return found


def names_of(rows: Sequence[Row]) -> list[str]:
    """Names that distinguish the rows of a claim: subject, metric or both."""
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
        _stacked(["; ".join(_beside(row)) for row in rows]),
    ]


def _stacked(cells: Sequence[str]) -> str:
    """Lines of one cell; the rows of a claim are level in all cells."""
    return "<br>".join(cells) if any(cells) else ""


def _figures_table(command: str, rows: Sequence[Row]) -> str:
    """A table of figures under its command. What all rows share (machine, commit, metric, unit) is
    written once above them, and columns that are empty in all of them are left out. Commits that
    differ are in bench/results."""
    shared = [f"`{command}`"]
    columns = {"": [row.what for row in rows]}
    shows_unit = len({row.unit for row in rows}) > 1
    varying: dict[str, list[str]] = {
        "metric": [row.metric for row in rows],
        "machine": [row.machine for row in rows],
    }
    for name, cells in varying.items():
        if len(set(cells)) == 1:
            shared.append(cells[0])
        else:
            columns[name] = cells
    if len({row.commit for row in rows}) == 1:
        shared.append(rows[0].commit)
    if not shows_unit and rows[0].unit:
        shared.append(rows[0].unit)
    columns |= {
        "figure": [_figure(row, shows_unit=shows_unit) for row in rows],
        "target": [_target(row, shows_unit=shows_unit) for row in rows],
        "beside": ["; ".join(_beside(row)) for row in rows],
    }
    used = {name: cells for name, cells in columns.items() if any(cells)}
    lines = [list(line) for line in zip(*used.values(), strict=True)]
    return f"{', '.join(shared)}:\n\n{_table(list(used), lines)}"


def _beside(row: Row) -> list[str]:
    """The figure as a share of each peer's; earlier commits and forms are no peers to a reader."""
    return [
        f"{row.median / figure:.2f} × {peer}"
        for peer, figure in row.peers.items()
        if COMMIT.fullmatch(peer) is None and peer not in EARLIER_FORMS
    ]


def _figure(row: Row, *, shows_unit: bool = True) -> str:
    least = min(row.readings)
    most = max(row.readings)
    readings = _range(least, most)
    interval = "" if row.interval is None else f" (95 %: {_range(*row.interval)})"
    return f"{readings}{interval} {row.unit if shows_unit else ''}".strip()


def _target(row: Row, *, shows_unit: bool = True) -> str:
    if row.target is None:
        return ""
    sign = "≤" if row.better == "less" else "≥"
    return f"{sign} {_number(row.target)} {row.unit if shows_unit else ''}".strip()


def _range(least: float, most: float) -> str:
    ends = dict.fromkeys((_number(least), _number(most)))
    return ("–" if least >= 0 else " to ").join(ends)


def _number(value: float) -> str:
    return (f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}").replace("-", "−")


def _anchor(heading: str) -> str:
    """The name that GitHub and the site give a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def _table(columns: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rows = [columns, *([cell.replace("|", "&#124;") for cell in line] for line in lines)]
    head, *rest = (f"| {' | '.join(row)} |\n" for row in rows)
    return head + "|---" * len(columns) + "|\n" + "".join(rest)


def _page(head: str, parts: Sequence[str]) -> str:
    return "\n".join([f"{NOTICE}\n\n{head.strip()}\n", *parts])
