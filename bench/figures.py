"""Times a benchmark of one piece, and prints its figures as a table, or with `--json` as JSON."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def seconds_of(work: Callable[[], object], rounds: int) -> list[float]:
    """Seconds of each of so many calls."""
    seconds = []
    for _ in range(rounds):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return seconds


def show_rows(rows: Sequence[Any], title: str, *, as_json: bool) -> None:
    """Prints dataclasses or mappings of one kind: a list of objects, or a table with a line each.

    Below the table stands what all rows have alike."""
    found = [dict(row) if isinstance(row, Mapping) else asdict(row) for row in rows]
    if as_json:
        print(json.dumps(found))
        return
    # Settings are counts or names, figures mostly fractions.
    settings = [
        name for name, value in found[0].items() if len(found) > 1 and not isinstance(value, float)
    ]
    alike = [name for name in settings if len({str(row[name]) for row in found}) == 1]
    caption = ", ".join(f"{_words(name)} {_cell(found[0][name])}" for name in alike)
    table = Table(title=title, caption=caption, box=box.SIMPLE_HEAD, pad_edge=False)
    columns = [name for name in found[0] if name not in alike]
    for name in columns:
        if isinstance(found[0][name], str):
            table.add_column(_words(name), min_width=min(10, max(len(row[name]) for row in found)))
        else:
            # A figure is never cut; its name takes a line a word.
            table.add_column(_words(name).replace(" ", "\n"), justify="right", no_wrap=True)
    for row in found:
        table.add_row(*(_cell(row[name]) for name in columns))
    Console().print(table)


def show_figures(figures: Mapping[str, Any], title: str, *, as_json: bool) -> None:
    """Prints one measurement: an object, or a table with a line for each figure."""
    if as_json:
        print(json.dumps(figures))
        return
    table = Table("figure", "value", title=title)
    for name, value in figures.items():
        table.add_row(_words(name), _cell(value))
    Console().print(table)


def print_table(columns: Sequence[str], lines: Iterable[Iterable[object]]) -> None:
    """Prints lines of cells under the names of their columns."""
    table = Table(*columns)
    for cells in lines:
        table.add_row(*map(str, cells))
    Console().print(table)


def _words(name: str) -> str:
    return name.replace("_", " ")


def _cell(value: Any) -> str:
    if isinstance(value, Mapping):
        return "  ".join(f"{name} {each}" for name, each in value.items())
    if isinstance(value, int | float):
        return f"{value:,}"
    if isinstance(value, list):
        return "  ".join(map(_cell, value))
    return "–" if value is None else str(value)
