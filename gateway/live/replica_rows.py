"""Rows of the processes of a cluster: engines with their load, and the stages in front of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headwater.services.index.kv_index import Column
from headwater.services.runtime.member import Kind, Member
from headwater.services.runtime.membership import Members

from ..router.replica import Replica
from ..router.router import Router

RoutedByReplica = Mapping[str, tuple[int, int, int]]
"""By `life_of` a replica: prompt tokens sent there, those predicted to be cached, and those found."""


def life_of(member: Member) -> str:
    """A name that a replica does not share with what it was before a restart."""
    return f"{member.replica_id} {_epoch(member)}"


def routed_by_replica(router: Router) -> dict[str, tuple[int, int, int]]:
    """What this gateway has sent where."""
    counts = ((each.member, each.routed) for each, _ in router.replicas())
    return {life_of(member): (routed.num_prompt, routed.num_predicted, routed.num_cached) for member, routed in counts}


def replica_rows(router: Router, routed: RoutedByReplica, now: float) -> list[dict[str, Any]]:
    """The engines in the order of their names; `now` on the monotonic clock. `routed` is what all gateways have sent
    where."""
    rows = [
        _row(replica, column, routed.get(life_of(replica.member), (0, 0, 0)), now)
        for replica, column in router.replicas()
    ]
    return sorted(rows, key=lambda row: (row["model"], row["id"]))


def stage_rows(gateways: Members, members: Members) -> list[dict[str, Any]]:
    """The processes in front of the engines."""
    kinds = ((gateways, Kind.GATEWAY), (members, Kind.PROCESSOR), (members, Kind.OUTPUT_PROCESSOR))
    found = [sorted(of.of(kind), key=lambda member: member.replica_id) for of, kind in kinds]
    return [_stage(member) for group in found for member in group]


def _row(replica: Replica, column: Column | None, routed: tuple[int, int, int], now: float) -> dict[str, Any]:
    member, load = replica.member, replica.load.reported
    num_prompt, num_predicted, num_cached = routed
    assert member.model is not None
    return {
        "id": member.replica_id,
        "epoch": _epoch(member),
        "model": member.model.name,
        "address": member.address,
        "state": _state(replica, now),
        "num_running": load.num_running,
        "num_waiting": load.num_waiting,
        "num_generated_tokens": load.num_generated_tokens,
        "num_used_blocks": load.num_used_blocks,
        "num_cached_blocks": len(column.stored) if column is not None else 0,
        "num_total_blocks": load.num_total_blocks,
        "num_used_host_blocks": load.num_used_host_blocks,
        "num_total_host_blocks": load.num_total_host_blocks,
        "block_size": replica.block_size,
        "step_seconds": load.itl_seconds,
        "prefix_queries": load.prefix_queries,
        "prefix_hits": load.prefix_hits,
        "routed_tokens": num_prompt,
        "predicted_tokens": num_predicted,
        "cached_tokens": num_cached,
        "trust": round(replica.trust.value, 3),
        "is_doubted": replica.trust.is_doubted,
        "is_synced": column is not None and column.is_synced,
        "load_age": round(replica.load_age(now), 2),
    }


def _epoch(member: Member) -> str:
    """Hexadecimal: it is too long for a number in JSON."""
    return f"{member.epoch:016x}"


def _state(replica: Replica, now: float) -> str:
    if replica.is_draining:
        return "draining"
    return "failing" if replica.breaker.is_open(now) else "serving"


def _stage(member: Member) -> dict[str, Any]:
    return {
        "kind": member.kind.value,
        "id": member.replica_id,
        "address": member.address,
        "rest_url": member.rest_url,
        "model": member.model.name if member.model is not None else None,
        "state": "draining" if member.draining else "serving",
        "without": list(member.without),
    }
