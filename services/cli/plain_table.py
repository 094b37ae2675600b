"""The one look of tables in the terminal: no lines, bold heads, addresses that break rather than vanish."""

from __future__ import annotations

from rich.table import Table


def plain_table(*columns: str, numbers: tuple[str, ...] = ()) -> Table:
    """`numbers` names the columns that are set to the right."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in columns:
        table.add_column(name, overflow="fold", justify="right" if name in numbers else "left")
    return table
