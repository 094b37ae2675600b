"""One part of a benchmark in a child process: its time is bounded, and its printed rows count
however it ends."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

Row = dict[str, Any]
FAILED = "failed"
TOO_LATE = "out of time"
LAST_LINES = 3
LAST_CHARACTERS = 300
"""Number of last lines, and of characters in them, that are kept of a failed program's errors."""


@dataclass(slots=True)
class Outcome:
    """Result of a program."""

    rows: list[Row] = field(default_factory=list)
    """JSON objects that it printed, one a line."""
    seconds: float = 0.0
    why: str = ""
    """Reason of its failure; empty if it succeeded."""


def run_part(
    command: Sequence[str],
    limit: float,
    on_row: Callable[[Row], None] = lambda row: None,
    *,
    cwd: Path | None = None,
) -> Outcome:
    """Runs a program for `limit` seconds at most, and ends it with all its children. `on_row` is
    called with each row at once; other lines go on to stderr, and the last of them are part of the
    reason for a failure."""
    began = time.monotonic()
    outcome = Outcome()
    if limit <= 0:
        outcome.why = TOO_LATE
        return outcome
    child = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        cwd=cwd,
    )
    assert child.stdout is not None
    assert child.stderr is not None
    is_late = threading.Event()
    last = deque[str](maxlen=LAST_LINES)
    listener = threading.Thread(target=_pass_on, args=(child.stderr, last))
    listener.start()

    def end() -> None:
        is_late.set()
        _kill(child)

    timer = threading.Timer(limit, end)
    timer.start()
    try:
        for line in child.stdout:
            if (row := _row(line)) is not None:
                outcome.rows.append(row)
                on_row(row)
            else:
                sys.stderr.write(line)
        code = child.wait()
        # A grandchild may still hold its stderr.
        _kill(child)
        listener.join()
    finally:
        timer.cancel()
        _kill(child)
        child.stdout.close()
        listener.join()
        child.stderr.close()
    outcome.seconds = round(time.monotonic() - began, 1)
    if code:
        outcome.why = TOO_LATE if is_late.is_set() else f"{FAILED} with {code}" + _words(last)
    return outcome


def run_named(
    ids: Sequence[str],
    key: str,
    command: Callable[[Sequence[str]], Sequence[str]],
    limit: float,
    on_row: Callable[[str, Row], None],
) -> dict[str, str]:
    """Runs a program that prints a row for each id, in order, under `key`. If it fails at an id, it
    is run again for those after it; two failures before the first row end this. Returns the ids
    without a row, and why."""
    missing = dict[str, str]()
    left = list(ids)
    end = time.monotonic() + limit
    num_barren = 0
    while left:
        outcome = run_part(command(left), end - time.monotonic(), lambda row: on_row(row[key], row))
        done = {row[key] for row in outcome.rows}
        left = [each for each in left if each not in done]
        num_barren = 0 if done else num_barren + 1
        if left:
            gone = left if outcome.why == TOO_LATE or num_barren == 2 else left[:1]
            missing |= dict.fromkeys(gone, outcome.why or FAILED)
            left = left[len(gone) :]
    return missing


def _pass_on(output: IO[str], last: deque[str]) -> None:
    for line in output:
        sys.stderr.write(line)
        if line.strip():
            last.append(line.strip())


def _words(last: Sequence[str]) -> str:
    return f": {' / '.join(last)[-LAST_CHARACTERS:]}" if last else ""


def _row(line: str) -> Row | None:
    if not line.startswith("{"):
        return None
    with contextlib.suppress(json.JSONDecodeError):
        row: Row = json.loads(line)
        return row
    return None


def _kill(child: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
