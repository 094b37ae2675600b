"""What lies in shared memory, so that a test sees what it has left there."""

from __future__ import annotations

import os


def shared_memory() -> set[str]:
    """Names of shared memory. Semaphores of multiprocessing belong to tests that run beside this one."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.mp-")}
