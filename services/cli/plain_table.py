"""The one look of tables in the terminal: no lines, bold heads, addresses that break rather than
vanish."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from rich.console import Console, RenderableType
from rich.table import Table


def show_as(answer: Any, table: Callable[[], RenderableType], as_json: bool) -> None:
    """Prints an answer as JSON, for scripts, or as the table that is made of it."""
    if as_json:
        print(json.dumps(answer, indent=2))
    else:
        Console().print(table())


def plain_table(*columns: str, numbers: tuple[str, ...] = ()) -> Table:
    """`numbers` names the columns that are set to the right."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in columns:
        table.add_column(name, overflow="fold", justify="right" if name in numbers else "left")
    return table
