"""The command line that the system shows of a process, by which forks of one process are
distinguished."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

FIRST_FIELD = 45
LAST_FIELD = 46
"""Fields of /proc/self/stat behind the name: addresses of the beginning and the end of the
arguments."""


def set_title(command: Sequence[str]) -> None:
    """Writes the command over the arguments that this process was started with, as much of it as
    finds room there."""
    fields = Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()
    begin = int(fields[FIRST_FIELD])
    end = int(fields[LAST_FIELD])
    room = end - begin - 1
    text = b"\0".join(word.encode() for word in command)[:room]
    ctypes.memmove(begin, text.ljust(room, b"\0"), room)
