"""Rows of the processes of a cluster: engines with their load, and the stages in front of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from headwater.services.index.kv_index import Column
from headwater.services.runtime.member import Kind, Member
from headwater.services.runtime.membership import Members

from ..router.replica import Replica
from ..router.router import Router

RoutedByReplica = Mapping[str, tuple[int, int, int]]
"""Keyed by `life_of` a replica: prompt tokens sent there, those predicted to be cached, and those
found."""

LOAD = (
    "num_running", "num_waiting", "num_generated_tokens", "num_used_blocks", "num_total_blocks",
    "num_used_host_blocks", "num_total_host_blocks", "num_used_disk_bytes", "num_total_disk_bytes",
    "prefix_queries", "prefix_hits", "num_held_bytes",
)  # fmt: skip
"""Fields of a replica's load that a row shows as they are."""


class Standing(msgspec.Struct):
    """A replica's standing at one gateway: how far it is trusted, and whether it fails."""

    trust: float
    """How far its index is believed for this replica: tokens found cached over tokens predicted, 0
    to 1."""
    is_doubted: bool
    is_synced: bool
    """The index has all that the replica has reported."""
    is_failing: bool
    """Whether this gateway's last requests failed there: it is sent one at a time until one
    succeeds."""


StandingsByReplica = Mapping[str, Mapping[str, Standing]]
"""Keyed by `life_of` a replica, then by gateway."""


def life_of(member: Member) -> str:
    """A name that a replica does not share with what it was before a restart."""
    return f"{member.replica_id} {_epoch(member)}"


def routed_by_replica(router: Router) -> dict[str, tuple[int, int, int]]:
    """Tokens of the prompts that this gateway has sent to each replica, by `life_of` it."""
    counts = ((each.member, each.routed) for each, _ in router.replicas())
    return {
        life_of(member): (routed.num_prompt, routed.num_predicted, routed.num_cached)
        for member, routed in counts
    }


def standings(router: Router, now: float) -> dict[str, Standing]:
    """Standing of each replica at this gateway, by `life_of` it; `now` on the monotonic clock."""
    return {
        life_of(replica.member): Standing(
            trust=round(replica.trust.value, 3),
            is_doubted=replica.trust.is_doubted,
            is_synced=replica.standing(column)[0],
            is_failing=replica.breaker.is_open(now),
        )
        for replica, column in router.replicas()
    }


def replica_rows(
    router: Router, routed: RoutedByReplica, standings: StandingsByReplica, now: float
) -> list[dict[str, Any]]:
    """The engines in the order of their names; `now` on the monotonic clock. `routed` and
    `standings` are those of all gateways."""
    rows = []
    for replica, column in router.replicas():
        life = life_of(replica.member)
        rows.append(
            _row(replica, column, routed.get(life, (0, 0, 0)), standings.get(life, {}), now)
        )
    return sorted(rows, key=lambda row: (row["model"], row["id"]))


def stage_rows(gateways: Members, members: Members) -> list[dict[str, Any]]:
    """The processes in front of the engines."""
    kinds = ((gateways, Kind.GATEWAY), (members, Kind.PROCESSOR), (members, Kind.OUTPUT_PROCESSOR))
    found = [sorted(of.of(kind), key=lambda member: member.replica_id) for of, kind in kinds]
    return [_stage(member) for group in found for member in group]


def _row(
    replica: Replica,
    column: Column | None,
    routed: tuple[int, int, int],
    standings: Mapping[str, Standing],
    now: float,
) -> dict[str, Any]:
    member = replica.member
    load = replica.load.reported
    num_prompt, num_predicted, num_cached = routed
    assert member.model is not None
    return {
        "id": member.replica_id,
        "epoch": _epoch(member),
        "model": member.model.name,
        "address": member.address,
        "version": member.version,
        "state": _state(replica, standings.values()),
        **{name: getattr(load, name) for name in LOAD},
        "num_cached_blocks": len(column.stored) if column is not None else 0,
        "block_size": replica.block_size,
        "kv_bytes": dict(load.kv_bytes),
        "step_seconds": load.itl_seconds,
        "routed_tokens": num_prompt,
        "predicted_tokens": num_predicted,
        "cached_tokens": num_cached,
        "trust": min((each.trust for each in standings.values()), default=1.0),
        "is_doubted": any(each.is_doubted for each in standings.values()),
        "is_synced": all(each.is_synced for each in standings.values()),
        "gateways": msgspec.to_builtins(standings),
        "load_age": round(replica.load_age(now), 2),
        "without": list(member.without),
    }


def _epoch(member: Member) -> str:
    """Hexadecimal: it is too long for a number in JSON."""
    return f"{member.epoch:016x}"


def _state(replica: Replica, standings: Iterable[Standing]) -> str:
    if replica.is_draining:
        return "draining"
    if not replica.load.reported.is_awake:
        return replica.load.reported.sleep_state
    return "failing" if any(each.is_failing for each in standings) else "serving"


def _stage(member: Member) -> dict[str, Any]:
    return {
        "kind": member.kind.value,
        "id": member.replica_id,
        "address": member.address,
        "rest_url": member.rest_url,
        "version": member.version,
        "model": member.model.name if member.model is not None else None,
        "state": "draining" if member.draining else "serving",
        "num_running": member.num_running,
        "without": list(member.without),
    }
