"""Logs of a deployment's processes: those of earlier starts stay, and each file has a bound.

`engine-0.log` is written now, `engine-0.log.1` was before it. Processes write into files that they
were given open: one that is full is copied and emptied, which a file opened to append allows.
"""

from __future__ import annotations

import asyncio
import glob
import os
import re
import shutil
from pathlib import Path

import structlog

from ..runtime.owner_file import OWN_LOG

MAX_LOG_BYTES = 20 << 20
EARLIER_LOGS = 4
"""Default number of earlier logs of a process that stay."""
CHECK_SECONDS = 5.0
_NUMBER = re.compile(r"\.log(\.\d+)?$")


def put_all_aside(folder: Path, most: int = EARLIER_LOGS) -> None:
    """Rotates the logs of a folder; `most` earlier logs of each process stay. Includes processes
    without a current log, so that logs of processes that no longer exist are deleted in time."""
    names = {_NUMBER.sub("", path.name) for path in folder.iterdir() if _NUMBER.search(path.name)}
    for name in names:
        _move_on(folder / f"{name}.log", most)


def put_aside(log: Path, most: int = EARLIER_LOGS) -> None:
    """Makes a log an earlier one, if there is one. Raises `OSError`."""
    if log.exists():
        _move_on(log, most)


def _move_on(log: Path, most: int) -> None:
    _make_room(log, most)
    if most and log.exists():
        log.rename(_numbered(log, 1))
    log.unlink(missing_ok=True)


def empty(log: Path, most: int = EARLIER_LOGS) -> None:
    """Copies a log that is being written into an earlier one, and empties it. Lines that are
    written between the two are lost. Raises `OSError`."""
    _remove_beyond(log, most - 1)
    if most:
        copy = log.with_name(f".{log.name}.copy")
        try:
            shutil.copyfile(log, copy)
            copy.chmod(OWN_LOG)
            # Only now: on a full disk each attempt would push an earlier log out.
            _make_room(log, most)
            copy.rename(_numbered(log, 1))
        except OSError:
            copy.unlink(missing_ok=True)
            raise
    os.truncate(log, 0)


async def keep_bounded(folder: Path, most: int = EARLIER_LOGS) -> None:
    """Empties logs that are full, until cancelled."""
    while True:
        await asyncio.sleep(CHECK_SECONDS)
        try:
            await asyncio.to_thread(_empty_full_ones, folder, most)
        except OSError as failure:
            # The disk is full: the process continues without rotation.
            structlog.get_logger().error("a full log stays as it is", problem=str(failure))


def _empty_full_ones(folder: Path, most: int) -> None:
    for log in folder.glob("*.log"):
        if log.stat().st_size > MAX_LOG_BYTES:
            empty(log, most)


def _make_room(log: Path, most: int) -> None:
    """Moves earlier logs one number on; those beyond `most` are removed."""
    _remove_beyond(log, most - 1)
    for idx in range(most - 1, 0, -1):
        if (earlier := _numbered(log, idx)).exists():
            earlier.rename(_numbered(log, idx + 1))


def _remove_beyond(log: Path, most: int) -> None:
    """Removes earlier logs, but for the latest `most`."""
    for earlier in log.parent.glob(f"{glob.escape(log.name)}.*"):
        number = earlier.suffix.removeprefix(".")
        if number.isdecimal() and int(number) > most:
            earlier.unlink()


def _numbered(log: Path, number: int) -> Path:
    return log.with_name(f"{log.name}.{number}")
