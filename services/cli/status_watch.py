"""`headwater status --watch`: the figures of the console in a terminal.

Heartbeats on NATS say how busy each engine is; a gateway's snapshot says what only gateways know.
Without a gateway that answers, or without the right to see all of it, the heartbeats are shown
alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
from rich.console import Group, RenderableType
from rich.table import Table

from ..runtime.member import Kind, Member
from ..runtime.printable import shown
from .plain_table import plain_table

RATE_SECONDS = 1.0
"""Heartbeats come each second: a rate over less would be 0 or twice what it is."""
ASK_SECONDS = 3.0
COLUMNS = ("running", "waiting", "tokens/s", "KV", "hits", "found of predicted", "trust")
COLOURS = {"error": "red", "warning": "yellow", "note": "dim"}
Snapshot = Mapping[str, Any]


@dataclass(slots=True)
class _Count:
    tokens: int
    at: float
    rate: float | None = None


class TokenRates:
    """Tokens a second of each engine, from the counts in its heartbeats."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, int], _Count] = {}

    def of(self, member: Member, now: float) -> float | None:
        """Rate of a counter; None until two heartbeats were seen."""
        tokens = member.load.num_generated_tokens if member.load is not None else 0
        count = self._counts.setdefault((member.replica_id, member.epoch), _Count(tokens, now))
        if now - count.at >= RATE_SECONDS:
            count.rate = (tokens - count.tokens) / (now - count.at)
            count.tokens = tokens
            count.at = now
        return count.rate


@dataclass(slots=True)
class GatewaySight:
    """The last snapshot of a gateway. Use `follow`."""

    rest: str
    """Base address; empty: no gateway is known."""
    snapshot: Snapshot | None = None
    headers: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, rest: str) -> GatewaySight:
        """Client with the administrator's key of the environment, if there is one."""
        key = os.environ.get("HEADWATER_ADMIN_KEY", "")
        return cls(rest, headers={"authorization": f"Bearer {key}"} if key else {})

    async def follow(self) -> None:
        """Asks once a second, until cancelled."""
        # Nothing is sent that a certificate would have to protect, unless a key goes along.
        async with httpx.AsyncClient(
            timeout=ASK_SECONDS, verify=bool(self.headers), headers=self.headers
        ) as client:
            while self.rest:
                self.snapshot = await self._ask(client)
                await asyncio.sleep(RATE_SECONDS)

    async def _ask(self, client: httpx.AsyncClient) -> Snapshot | None:
        with contextlib.suppress(httpx.HTTPError, ValueError):
            reply = await client.get(f"{self.rest}/console/live", params={"once": "1"})
            if reply.is_success:
                snapshot: Snapshot = reply.json()
                return snapshot if snapshot["caller"]["is_admin"] else None
        return None


def watched(
    members: Sequence[Member], rates: TokenRates, snapshot: Snapshot | None
) -> list[RenderableType]:
    """A line of totals, the engines of each model, and what a gateway finds missing or degraded."""
    now = time.monotonic()
    engines = [member for member in members if member.kind is Kind.ENGINE]
    found = {(row["id"], row["epoch"]): row for row in (snapshot or {}).get("replicas", ())}
    tokens = [rate for each in engines if (rate := rates.of(each, now)) is not None]
    parts: list[RenderableType] = [_totals(snapshot, sum(tokens)), ""]
    for model in dict.fromkeys(
        each.model.name if each.model is not None else "" for each in engines
    ):
        own = [each for each in engines if each.model is not None and each.model.name == model]
        parts += [f"[bold]{shown(model)}[/]", _engines(own, rates, found, now), ""]
    return parts


def findings(snapshot: Snapshot | None) -> Group:
    rows = (snapshot or {}).get("findings", ())
    return Group(
        *(
            f"[{COLOURS[row['level']]}]{shown(row['what'])}[/]: {shown(row['advice'])}"
            for row in rows
        )
    )


def _totals(snapshot: Snapshot | None, tokens: float) -> str:
    rate = f"[bold]{tokens:,.0f}[/] tokens/s"
    if snapshot is None:
        return rate
    totals = snapshot["totals"]
    cached = _share(totals["cached_tokens"], totals["prompt_tokens"])
    counts = f"[bold]{totals['num_running']}[/] running, [bold]{totals['num_waiting']}[/] waiting"
    return (
        f"{rate}, {counts}, {cached} of prompt tokens cached, index lag "
        f"{snapshot['event_lag'] * 1e3:.0f} ms"
    )


def _engines(
    replicas: Sequence[Member],
    rates: TokenRates,
    found: Mapping[tuple[str, str], Mapping[str, Any]],
    now: float,
) -> Table:
    table = plain_table("engine", *COLUMNS, "state", numbers=COLUMNS)
    for each in replicas:
        row = found.get((each.replica_id, f"{each.epoch:016x}"), {})
        state = row.get("state") or ("draining" if each.draining else "serving")
        table.add_row(
            shown(each.replica_id), *_cells(each, rates.of(each, now)), *_trust_cells(row), state
        )
    return table


def _cells(member: Member, rate: float | None) -> tuple[str, ...]:
    load = member.load
    if load is None:
        return ("",) * 5
    tokens = "–" if rate is None else f"{rate:,.0f}"
    blocks = _share(load.num_used_blocks, load.num_total_blocks)
    if load.num_total_host_blocks:
        blocks += f" +{_share(load.num_used_host_blocks, load.num_total_host_blocks)}"
    if load.num_total_disk_bytes:
        blocks += f" disk {_share(load.num_used_disk_bytes, load.num_total_disk_bytes)}"
    return (
        str(load.num_running),
        str(load.num_waiting),
        tokens,
        blocks,
        _share(load.prefix_hits, load.prefix_queries),
    )


def _trust_cells(row: Mapping[str, Any]) -> tuple[str, str]:
    if not row:
        return "–", "–"
    routed = row["routed_tokens"]
    return (
        f"{_share(row['cached_tokens'], routed)} of {_share(row['predicted_tokens'], routed)}",
        f"{row['trust']:.0%}",
    )


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.0%}" if whole else "–"
