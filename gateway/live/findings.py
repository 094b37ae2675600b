"""Findings: sentences about missing or degraded parts, with advice. Reads rows made elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

FULL = 0.97
"""Share of KV blocks in use from which on requests wait for others to end."""
SILENT_SECONDS = 5.0
MISSING = {
    "draining": "the gateway ends what runs and takes nothing new; ask another one",
    "processor": "start one with `headwater serve processor`; `up` restarts its own: see its log",
    "output processor": "start one with `headwater serve output-processor`; `up` restarts its "
    "own: see its log",
    "engine": "start one with `headwater serve engine`; `up` restarts its own: see its log, and "
    "`headwater doctor`",
}
OUTAGES = {
    "nats": "answers go on; tenants, batches and new members wait: see that NATS runs and is "
    "reachable",
    "redis": "answers go on; limits are local, the index is this gateway's own: see that Redis "
    "runs and is reachable",
    "redis in time": "Redis answers late: give it a core, or look for what slows its network",
    "kv disk": "prefixes come from memory alone: see its log, mend the disk or give it room, "
    "start the engine again",
    "events": "there are more cache events than this gateway can follow, so Redis is asked: add "
    "gateways",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """`level`: error (requests fail), warning (requests are slower or at risk) or note."""

    level: str
    what: str
    advice: str


def cluster_findings(
    *,
    missing: Sequence[str],
    awaited: Sequence[str],
    models: Iterable[Mapping[str, Any]],
    outages: Sequence[str],
    processes: Iterable[Mapping[str, Any]],
    replicas: Sequence[Mapping[str, Any]],
    num_waiting: int,
) -> Iterator[Finding]:
    """All findings of a cluster. Of a tenant's watcher the last four arguments are empty."""
    yield from service_findings(missing, awaited, outages)
    yield from model_findings(models)
    yield from process_findings(processes)
    yield from replica_findings(replicas)
    yield from queue_findings(num_waiting)


def service_findings(
    missing: Sequence[str], awaited: Sequence[str], outages: Sequence[str]
) -> Iterator[Finding]:
    for stage in missing:
        yield Finding(
            "error", f"{stage} is missing" if stage != "draining" else "draining", MISSING[stage]
        )
    for stage in awaited:
        yield Finding(
            "note",
            f"no {stage} yet",
            "it is starting, or the first request starts it; requests wait",
        )
    for what in outages:
        yield Finding("warning", f"without {what}", OUTAGES[what])


def process_findings(rows: Iterable[Mapping[str, Any]]) -> Iterator[Finding]:
    """Servers that processes other than this gateway cannot reach, and tiers that they lost."""
    for row in rows:
        for what in row["without"]:
            yield Finding(
                "warning", f"{row['id']} is without {what}", OUTAGES.get(what, "see its log")
            )


def replica_findings(rows: Iterable[Mapping[str, Any]]) -> Iterator[Finding]:
    for row in rows:
        name = row["id"]
        if row["state"] == "draining":
            yield Finding(
                "note",
                f"{name} drains",
                "it ends what runs and leaves; a supervisor starts another one",
            )
        elif row["state"] == "failing":
            yield Finding(
                "warning",
                f"{name} failed",
                "it gets one request at a time until one succeeds; see its log",
            )
        if row["load_age"] > SILENT_SECONDS:
            what = f"{name} has reported nothing for {row['load_age']:.0f} s"
            yield Finding("warning", what, "its process or its way to NATS is held up; see its log")
        if row["num_total_blocks"] and row["num_used_blocks"] / row["num_total_blocks"] > FULL:
            advice = (
                "requests wait for others to end: add a replica, or give the KV cache more memory"
            )
            yield Finding("warning", f"the KV cache of {name} is full", advice)
        doubting = {
            gateway: each["trust"]
            for gateway, each in row["gateways"].items()
            if each["is_doubted"]
        }
        if doubting:
            advice = (
                "fewer tokens are found cached than predicted: its cache is short of room, "
                "or events are lost"
            )
            by = ", ".join(
                f"at {trust:.0%} by {gateway}" for gateway, trust in sorted(doubting.items())
            )
            yield Finding("warning", f"{name} is trusted {by}", advice)


def model_findings(rows: Iterable[Mapping[str, Any]]) -> Iterator[Finding]:
    for row in rows:
        if row["problem"]:
            advice = "it is tried again; unload the model, or mend what the sentence names"
            yield Finding("error", f"{row['id']}: {row['problem']}", advice)
        elif row["num_without_replica"]:
            what = f"{row['num_without_replica']} requests wait for an engine of {row['id']}"
            yield Finding("note", what, "it is starting; they are answered when it is there")


def queue_findings(num_waiting: int) -> Iterator[Finding]:
    if num_waiting:
        advice = (
            "all replicas have as much as they take: wait, add replicas, or lower what "
            "tenants may have at once"
        )
        yield Finding("note", f"{num_waiting} requests wait for their turn", advice)
