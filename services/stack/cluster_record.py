"""`line.json` in the state folder: where a running cluster answers and which processes it has.

It is gone when the cluster is, and not believed when the cluster was killed.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import msgspec

from .stack_error import StackError

CLUSTER_FILE = "line.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRecord:
    """One supervised process; restarted, it has another pid and may have other addresses."""

    name: str
    pid: int
    addresses: dict[str, str]
    children: tuple[int, ...] = ()
    """Process ids of what it started itself: the core of an engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterRecord:
    """A cluster that is ready."""

    pid: int
    """Process id of the supervisor."""
    model: str
    """Served name."""
    rest: str
    """Base address of the REST API."""
    grpc: str
    """host:port of the public gRPC API."""
    nats_url: str
    redis_url: str
    stages: tuple[StageRecord, ...]

    def write(self, state_dir: Path) -> None:
        """Readers see the old record or the new one, never half of one."""
        partial = state_dir / f".{CLUSTER_FILE}"
        # Addresses may hold passwords.
        partial.touch(mode=0o600)
        partial.write_bytes(msgspec.json.format(msgspec.json.encode(self)))
        partial.rename(state_dir / CLUSTER_FILE)


def read_cluster(state_dir: Path) -> ClusterRecord | None:
    """Record of the cluster that runs with this state folder; None when none does."""
    path = state_dir / CLUSTER_FILE
    if not path.exists():
        return None
    record = msgspec.json.decode(path.read_bytes(), type=ClusterRecord)
    return record if _is_running(record.pid) else None


def pid_of_stage(state_dir: Path, name: str) -> int:
    """Process id of a stage of the running cluster. Raises `StackError`."""
    record = read_cluster(state_dir)
    if record is None:
        raise StackError(f"no cluster runs with the state folder {state_dir}")
    pids = {stage.name: stage.pid for stage in record.stages}
    if name not in pids:
        raise StackError(f"name is {name!r}; allowed: {', '.join(pids)}")
    return pids[name]


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        # The process exists and is another user's.
        return True
    return True


def remove_cluster(state_dir: Path) -> None:
    (state_dir / CLUSTER_FILE).unlink(missing_ok=True)
