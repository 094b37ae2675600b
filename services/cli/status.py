"""`headwater status`: who is in the cluster and how busy, from heartbeats on NATS."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from typing import Any

import httpx
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table

from ..runtime.bus import Bus, without_password
from ..runtime.cluster_key import ClusterKey, using
from ..runtime.member import Kind, Member
from ..runtime.membership import Members
from ..runtime.printable import shown
from ..runtime.role import BOTH
from ..runtime.tasks import owned_task
from .cluster_unreachable import BusUnreachable
from .plain_table import plain_table
from .status_watch import GatewaySight, TokenRates, findings, watched

ASK_SECONDS = 3.0
LISTEN_SECONDS = 1.2
"""A heartbeat comes each second."""


def seen(
    nats_url: str, key: ClusterKey | None, console: Console | None, rest: str = ""
) -> list[Member]:
    """Members whose heartbeats the key verifies. With a console they are shown there until
    interrupted, beside the snapshot of the gateway at `rest`. Raises `BusUnreachable`."""
    with using(key):
        if console is not None:
            asyncio.run(watch(nats_url, console, rest))
        return asyncio.run(listen(nats_url))


async def listen(nats_url: str) -> list[Member]:
    """Members that send a heartbeat within one interval of heartbeats. Raises `BusUnreachable`."""
    async with Bus.open(nats_url) as bus:
        if not bus.connected:
            raise BusUnreachable(without_password(nats_url))
        async with Members(bus, Kind).running() as members:
            await asyncio.sleep(LISTEN_SECONDS)
            return _everyone(members)


async def ask_gateway(rest: str) -> str:
    """State of the gateway at a base address, over REST: the cluster goes on without NATS. Empty:
    no answer."""
    # Nothing is sent that a certificate would have to protect.
    async with httpx.AsyncClient(base_url=rest, timeout=ASK_SECONDS, verify=False) as client:
        try:
            answer = (await client.get("/ready")).json()
        except (httpx.HTTPError, ValueError):
            return ""
    state = "is ready" if answer["ready"] else f"misses {', '.join(answer['missing'])}"
    state += ", engine starting" if answer.get("awaited") else ""
    without = ", ".join(answer.get("without", ()))
    return f"the gateway at {rest} {state}" + (f", without {without}" if without else "")


async def watch(nats_url: str, console: Console, rest: str = "") -> None:
    """Live tables until cancelled. Raises `BusUnreachable`."""
    rates = TokenRates()
    gateway = GatewaySight.of(rest)
    async with Bus.open(nats_url) as bus:
        if not bus.connected:
            raise BusUnreachable(without_password(nats_url))
        async with Members(bus, Kind).running() as members, owned_task(gateway.follow()):
            with Live(console=console, auto_refresh=False) as live:
                while True:
                    everyone = _everyone(members)
                    engines = watched(everyone, rates, gateway.snapshot)
                    live.update(
                        Group(*engines, _front(everyone), "", findings(gateway.snapshot)),
                        refresh=True,
                    )
                    await asyncio.sleep(0.5)


def _everyone(members: Members) -> list[Member]:
    return [
        member
        for kind in Kind
        for member in sorted(members.of(kind), key=lambda each: each.replica_id)
    ]


def as_table(members: Sequence[Member]) -> Group:
    """The engines of each model and how busy they are, then the processes in front of them; fits 80
    columns."""
    engines: dict[str, list[Member]] = {}
    for member in members:
        if member.kind is Kind.ENGINE:
            engines.setdefault(member.model.name if member.model is not None else "", []).append(
                member
            )
    parts: list[RenderableType] = []
    for model, replicas in engines.items():
        parts += [f"[bold]{shown(model)}[/]", _engines(replicas), *_adapters(replicas), ""]
    return Group(*parts, _front(members), *_versions(members))


def _front(members: Sequence[Member]) -> Table:
    """The processes in front of the engines."""
    front = plain_table("stage", "name", "address", "state")
    for member in members:
        if member.kind is not Kind.ENGINE:
            addresses = "\n".join(shown(each) for each in (member.rest_url, member.address) if each)
            front.add_row(
                member.kind.value.replace("_", " "),
                shown(member.replica_id),
                addresses,
                _state(member),
            )
    return front


def _versions(members: Sequence[Member]) -> list[str]:
    """A line with the version of all processes, or one for each version that some have."""
    names: dict[str, list[str]] = {}
    for member in members:
        names.setdefault(member.version or "unknown", []).append(shown(member.replica_id))
    if names.keys() <= {"unknown"}:
        return []
    if len(names) == 1:
        return ["", *(f"version {shown(each)}" for each in names)]
    return ["", *(f"version {shown(each)}: {', '.join(names[each])}" for each in sorted(names))]


def _engines(replicas: Sequence[Member]) -> Table:
    numbers = ("running", "waiting", "KV blocks", "hits", "step")
    table = plain_table("engine", "address", *numbers, "state", numbers=numbers)
    for each in replicas:
        table.add_row(shown(each.replica_id), shown(each.address), *_load_cells(each), _state(each))
    return table


def _adapters(replicas: Sequence[Member]) -> list[str]:
    """A line with the number of adapters of each engine; none where no engine has any."""
    counts = []
    for each in replicas:
        num_resident = 0 if each.load is None else len(each.load.resident_adapters)
        counts.append(f"{shown(each.replica_id)} {len(each.adapters)} ({num_resident} on device)")
    return ["adapters: " + ", ".join(counts)] if any(each.adapters for each in replicas) else []


def _state(member: Member) -> str:
    state = "[yellow]draining[/]" if member.draining else "[green]serving[/]"
    if member.load is not None and not member.load.is_awake:
        released = member.load.num_released_bytes / 1e9
        state = f"[cyan]{shown(member.load.sleep_state)}[/] ({released:.2f} GB given back)"
    elif member.load is not None and member.load.num_held_bytes:
        state += f" ({member.load.num_held_bytes / 1e9:.2f} GB held)"
    if member.load is not None and member.load.role not in ("", BOTH):
        state += f" {shown(member.load.role)}"
    return state + (
        f" [yellow]without {shown(', '.join(member.without))}[/]" if member.without else ""
    )


def _load_cells(member: Member) -> tuple[str, ...]:
    load = member.load
    if load is None:
        return ("",) * 5
    hits = f"{load.prefix_hits / load.prefix_queries:.0%}" if load.prefix_queries else "–"
    blocks = f"{load.num_used_blocks}/{load.num_total_blocks}"
    step = f"{load.itl_seconds * 1e3:.1f} ms" if load.itl_seconds else "–"
    return (str(load.num_running), str(load.num_waiting), blocks, hits, step)


def as_json(members: Sequence[Member]) -> list[dict[str, Any]]:
    """Members as JSON has them: hashes and epochs are hexadecimal."""
    return [
        {
            **_without_bytes(dataclasses.asdict(member)),
            "kind": member.kind.value,
            "epoch": f"{member.epoch:016x}",
        }
        for member in members
    ]


def _without_bytes(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, dict):
        return {name: _without_bytes(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_without_bytes, value))
    return value
