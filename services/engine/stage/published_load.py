"""The load of an engine as other processes get it."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from headwater.engine_core.step_output import EngineLoad

from ...runtime.member import ReplicaLoad

_SAME = {each.name for each in fields(EngineLoad)} & {each.name for each in fields(ReplicaLoad)}
"""Figures that other processes get as the core reports them."""


def replica_load(load: EngineLoad, **more: Any) -> ReplicaLoad:
    """`more`: figures that the core does not report, or reports in another form."""
    disk = load.disk
    peers = load.peers
    same: dict[str, Any] = {name: getattr(load, name) for name in _SAME}
    return ReplicaLoad(
        **(same | more),
        seconds_per_pulled_token=0.0 if peers is None else peers.seconds_per_token,
        num_used_disk_bytes=0 if disk is None else disk.num_bytes,
        num_total_disk_bytes=0 if disk is None else disk.max_bytes,
    )
