"""What lies in shared memory, so that a test sees what it has left there."""

from __future__ import annotations

import os
from pathlib import Path


def shared_memory() -> set[str]:
    """Names of shared memory. Semaphores of multiprocessing belong to tests that run beside this
    one."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.mp-")}


def shared_memory_of(*pids: int) -> set[Path]:
    """Paths of named shared memory that the processes map. Other processes of this machine map
    their own."""
    named = set()
    for pid in pids:
        rows = Path(f"/proc/{pid}/maps").read_text().splitlines()
        named |= {Path(row.split()[5]) for row in rows if " /dev/shm/" in row}
    return named
