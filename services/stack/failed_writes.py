"""Starts the embedded NATS again after its disk was full: a stream of which one write has failed
takes no more writes in that life of the server (2.15).

Knows the server's log and its disk; knows nothing about streams.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

from .embedded import STOP_SECONDS
from .stage_process import KeptStage

CHECK_SECONDS = 5.0
LEAST_ROOM = 16 << 20
"""Free bytes of the disk from which on the server is started again: two files of a stream."""
LEAST_FILES = 64
"""The same of files that the disk may still get."""
FAULT = b"no space left on device"


class ServerLog:
    """The log of a server, read piece by piece; a shorter file than before is a new one."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._num_read = 0

    def has_new_fault(self) -> bool:
        """Whether a write has failed since the last call. Raises `OSError`."""
        with self._path.open("rb") as file:
            if file.seek(0, os.SEEK_END) < self._num_read:
                self._num_read = 0
            file.seek(self._num_read)
            text = file.read()
        self._num_read += len(text)
        return FAULT in text


async def restart_after_failed_writes(
    nats: KeptStage, log: Path, streams: Path, report: Callable[[str], None]
) -> None:
    """Ends NATS, which `nats` then starts again, once a write has failed and the disk of the folder
    of its streams has room; until cancelled. NOTE: a full disk takes no log lines either, so
    failures are known when there is room."""
    lines = ServerLog(log)
    has_failed = False
    while True:
        await asyncio.sleep(CHECK_SECONDS)
        try:
            has_failed |= await asyncio.to_thread(lines.has_new_fault)
            has_room = _has_room(streams)
        except OSError:
            # The log is being moved aside, or its disk is away.
            continue
        if has_failed and has_room and nats.process is not None:
            report("nats could not write to its disk, which has room again; it is started again")
            await nats.process.stop(STOP_SECONDS, asyncio.Event())
            has_failed = False


def _has_room(folder: Path) -> bool:
    """Whether its disk takes bytes and files: a system names the lack of either by the same words.
    Raises `OSError`."""
    disk = os.statvfs(folder)
    # Some file systems, as btrfs, do not count files.
    has_files = not disk.f_files or disk.f_favail >= LEAST_FILES
    return has_files and disk.f_bavail * disk.f_frsize >= LEAST_ROOM
