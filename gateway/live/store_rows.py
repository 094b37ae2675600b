"""Rows of the stores behind the gateways: NATS with its streams, Redis, with their fill."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from nats.js import JetStreamContext
from nats.js.api import StreamInfo
from redis.exceptions import ResponseError

from headwater.services.runtime.bus import Bus
from headwater.services.runtime.store import Store, StoreUnavailable

from ..buckets import FAILURES

ASK_SECONDS = 3.0


def store_row(kind: str, name: str, **known: Any) -> dict[str, Any]:
    """A row; what is not known of a store is null."""
    unknown = dict.fromkeys(("used_bytes", "total_bytes", "num_items", "seconds"))
    return {"kind": kind, "name": name, **unknown, "used_bytes": 0, "problem": ""} | known


async def nats_rows(bus: Bus) -> list[dict[str, Any]]:
    """A row of the server's storage, and one of each stream; none without NATS."""
    if bus.url is None:
        return []
    js = bus.jetstream()
    if js is None:
        return [store_row("NATS", "NATS", problem="it cannot be reached")]
    began = time.monotonic()
    try:
        async with asyncio.timeout(ASK_SECONDS):
            account = await js.account_info()
            took = time.monotonic() - began
            streams = await _streams(js)
    except FAILURES as failure:
        return [store_row("NATS", "NATS", problem=str(failure) or "no answer in time")]
    whole = store_row(
        "NATS",
        "storage of all streams",
        used_bytes=account.storage,
        total_bytes=_bound(account.limits.max_storage),
        seconds=took,
    )
    return [whole, *sorted(map(_stream_row, streams), key=lambda row: str(row["name"]))]


async def _streams(js: JetStreamContext) -> list[StreamInfo]:
    found: list[StreamInfo] = []
    while page := await js.streams_info(offset=len(found)):
        found += page
    return found


def _stream_row(stream: StreamInfo) -> dict[str, Any]:
    return store_row(
        "NATS stream",
        stream.config.name or "",
        used_bytes=stream.state.bytes,
        total_bytes=_bound(stream.config.max_bytes),
        num_items=stream.state.messages,
    )


def _bound(value: int | None) -> int | None:
    """NATS shows no bound as -1."""
    return value if value is not None and value > 0 else None


async def redis_rows(store: Store) -> list[dict[str, Any]]:
    """A row of the server's memory; none without Redis."""
    if store.url is None:
        return []
    began = time.monotonic()
    try:
        num_keys = await store.command("DBSIZE")
        took = time.monotonic() - began
        info = await store.command("INFO", "memory")
    except (StoreUnavailable, ResponseError) as failure:
        return [store_row("Redis", "Redis", problem=str(failure))]
    return [
        store_row(
            "Redis",
            "memory",
            used_bytes=int(info.get("used_memory", 0)),
            total_bytes=int(info.get("maxmemory", 0)) or None,
            num_items=int(num_keys),
            seconds=took,
        )
    ]
