"""Waits until a cluster's gateway is ready; reports what it waits for when that takes long, and
which server is missing."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from urllib.parse import SplitResult, urlsplit

import httpx

from ..runtime.tasks import owned_task

LATE_SECONDS = 5.0
CONNECT_SECONDS = 2.0
PORTS = {
    "nats": 4222,
    "tls": 4222,
    "redis": 6379,
    "rediss": 6379,
    "redis+cluster": 6379,
    "redis+sentinel": 26379,
}
"""Ports of addresses without one, by scheme."""
POLL_SECONDS = 0.05


async def until_ready(
    gateway: httpx.AsyncClient,
    servers: Mapping[str, str | None],
    say: Callable[[str], None],
    *,
    late_seconds: float = LATE_SECONDS,
) -> None:
    """`servers`: addresses of servers that are not ours, if any, by name."""
    outside = {name: url for name, url in servers.items() if url is not None}
    async with owned_task(_report_when_late(gateway, outside, say, late_seconds)):
        while not await _is_ready(gateway):  # noqa: ASYNC110 (another process)
            await asyncio.sleep(POLL_SECONDS)
    # A gateway is ready without Redis.
    for name in await _silent(outside):
        say(f"going on without {name}: no server answers at {_address(outside[name])}")


async def _is_ready(gateway: httpx.AsyncClient) -> bool:
    try:
        return (await gateway.get("/ready")).status_code == httpx.codes.OK
    except httpx.TimeoutException:
        # A busy machine answers late: callers have limits of their own.
        return False


async def _report_when_late(
    gateway: httpx.AsyncClient,
    servers: Mapping[str, str],
    say: Callable[[str], None],
    late_seconds: float,
) -> None:
    await asyncio.sleep(late_seconds)
    if silent := await _silent(servers):
        say(
            "still waiting: "
            + ", ".join(
                f"no server answers at {_address(servers[name])} ({name})" for name in silent
            )
        )
        return
    with contextlib.suppress(httpx.TimeoutException):
        if missing := (await gateway.get("/ready")).json()["missing"]:
            say("still waiting for: " + ", ".join(missing))


async def _silent(servers: Mapping[str, str]) -> list[str]:
    """Names of the servers that take no connection."""
    return [name for name, url in servers.items() if not await _answers(url)]


async def _answers(urls: str) -> bool:
    """Whether one of the servers answers. A server without a host, such as a socket file, is not
    asked."""
    for at in _split(urls):
        if at.hostname is None:
            return True
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(CONNECT_SECONDS):
                _, writer = await asyncio.open_connection(
                    at.hostname, at.port or PORTS.get(at.scheme, 0)
                )
            writer.close()
            return True
    return False


def _address(urls: str) -> str:
    """Address without user and password."""
    return ", ".join(at.netloc.rpartition("@")[2] for at in _split(urls))


def _split(urls: str) -> list[SplitResult]:
    """The addresses of a setting. One without a scheme has that of the first, which for NATS may
    have none."""
    scheme = urls.partition("://")[0] if "://" in urls else "nats"
    return [urlsplit(url if "://" in url else f"{scheme}://{url}") for url in urls.split(",")]
