"""Figures of processes on this machine, as /proc has them."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def stat_of(pid: int) -> list[str]:
    """Fields of proc(5)'s stat from the third on."""
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()


def cpu_seconds(pid: int) -> float:
    """User and system seconds up to now."""
    user, system = stat_of(pid)[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def children_of(pid: int) -> list[int]:
    """Ids of the child processes of all of its threads; empty on systems that do not report
    them."""
    return [
        int(child)
        for path in Path(f"/proc/{pid}/task").glob("*/children")
        for child in path.read_text().split()
    ]


def cpu_seconds_of_all(pid: int) -> float:
    """User and system seconds of a process and all of its descendants, those that have ended
    included."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        own = sum(map(int, stat_of(pid)[11:15])) / os.sysconf("SC_CLK_TCK")
        return own + sum(map(cpu_seconds_of_all, children_of(pid)))
    return 0.0


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
