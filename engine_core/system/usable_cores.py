"""Number of cores whose time this process may use, by its affinity and by the CPU quotas of its
cgroups (v1 and v2)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")


def usable_cores() -> int:
    """Number of cores that this process may use, by affinity and CPU quota; at least 1."""
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    return min(cores, quota_cores() or cores)


@cache
def quota_cores(proc: Path = PROC, cgroups: Path = CGROUPS) -> int | None:
    """Number of cores, rounded up, that the CPU quota of this process is worth: the least of its
    cgroup and those above. None where no readable file sets one. `proc` and `cgroups` are where the
    system shows processes and cgroups."""
    quotas = (_quota(folder) for folder in _cgroup_folders(proc, cgroups))
    return min((quota for quota in quotas if quota is not None), default=None)


def _cgroup_folders(proc: Path, cgroups: Path) -> Iterator[Path]:
    """Folders that may have the files of a cgroup with a CPU quota: the process's own and all above
    it, up to where cgroups are mounted. In a container of v1 only the topmost exists, which is the
    container's own cgroup."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except (OSError, ValueError):
        return
    for line in lines:
        controllers, _, path = line.partition(":")[2].partition(":")
        if not controllers or "cpu" in controllers.split(","):
            # Systems mount v1's controller under its own name, under that of all mounted with it,
            # or under both.
            for root in {cgroups / controllers, cgroups / "cpu"} if controllers else {cgroups}:
                own = root / path.lstrip("/")
                yield from (own, *own.parents[: len(own.parts) - len(root.parts)])


def _quota(folder: Path) -> int | None:
    """Cores, rounded up, of the quota in a cgroup's folder; None where it has none."""
    try:
        if (limit := folder / "cpu.max").exists():
            quota, period = limit.read_text().split()
        else:
            quota, period = (
                (folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period")
            )
        # Both are whole microseconds. Without a quota v2 has `max` and v1 -1.
        return -(-int(quota) // int(period)) if int(quota) > 0 else None
    except (OSError, ValueError, ZeroDivisionError):
        return None
