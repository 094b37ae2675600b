"""Progress of long work, for people. Knows nothing about the work."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Column

from .printable import shown

Report = Callable[[str, int, int], None]
"""report(what, done, total): the part called `what` stands at `done` of `total`; the unit is the
caller's."""


def report_line(what: str, done: int, total: int) -> None:
    """Report of a child to its parent, as a line of its output. Threads may report at once."""
    line = json.dumps({"what": what, "done": done, "total": total})
    # `print` would write the line's end for itself.
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def word_of(line: str) -> dict[str, Any] | None:
    """Report in a line of a child that writes a JSON object a line; None for other lines, of its
    libraries for example."""
    try:
        word = json.loads(line)
    except ValueError:
        return None
    return (
        word
        if isinstance(word, dict) and (word.keys() >= {"what", "done", "total"} or "folder" in word)
        else None
    )


def silent(what: str, done: int, total: int) -> None:
    """Ignores reports."""


class ProgressBars:
    """Progress bars, one for each `what` that is reported. Use as a context manager and pass
    `report` on."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            # Together 80 columns: a narrow terminal would cut off all of them.
            TextColumn(
                "{task.description:<40}",
                table_column=Column(max_width=40, no_wrap=True, overflow="ellipsis"),
            ),
            BarColumn(bar_width=20),
            TextColumn("{task.percentage:>4.0f} %"),
            TimeRemainingColumn(elapsed_when_finished=True),
            console=console,
        )
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        if self._tasks:
            self._progress.stop()

    def report(self, what: str, done: int, total: int) -> None:
        self._progress.start()
        if what not in self._tasks:
            self._tasks[what] = self._progress.add_task(shown(what), total=total)
        self._progress.update(self._tasks[what], completed=done, total=total)
