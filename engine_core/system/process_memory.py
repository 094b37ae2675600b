"""Memory without a name that a process of this host shares: how another process of the same user
finds it.

Knows which host and processes are meant; knows nothing about what the memory holds.
"""

from __future__ import annotations

import os
from pathlib import Path

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
PROCESSES = Path("/proc/self/ns/pid")
"""Names the namespace of process ids that this process is in: those of two containers differ."""


def is_shareable() -> bool:
    """Whether descriptors of other processes can be opened on this system."""
    return BOOT_ID.exists()


def host_id() -> str:
    """Id that is equal for processes of which one can open the other's descriptors, as far as the
    host's namespaces show."""
    return f"{BOOT_ID.read_text().strip()} {os.readlink(PROCESSES)}"


def open_memory(process: int, descriptor: int, name: str) -> int:
    """Opens, to be read, the memory with that name that a process has under a descriptor. Raises
    `OSError`."""
    path = f"/proc/{process}/fd/{descriptor}"
    # The process may have ended, and its number may be another one's.
    if name not in os.readlink(path):
        raise OSError(f"{path} is not the memory of that engine")
    return os.open(path, os.O_RDONLY)
