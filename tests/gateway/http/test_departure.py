"""A client's leaving is heard without a task, once, and not after one has stopped listening."""

from __future__ import annotations

import asyncio
from collections.abc import MutableMapping
from typing import Any

from headwater.gateway.http.departure import Departure


class Server:
    """Its `receive` pauses without waiting for anything, then waits for what `said` brings."""

    def __init__(self) -> None:
        self.said: asyncio.Queue[str] = asyncio.Queue()
        self.num_received = 0

    async def receive(self) -> MutableMapping[str, Any]:
        await asyncio.sleep(0)
        kind = await self.said.get()
        self.num_received += 1
        return {"type": kind}


async def until_quiet() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_leaving_is_told_once_behind_whatever_comes_before_it() -> None:
    server, told = Server(), list[str]()
    departure = Departure(server.receive, lambda: told.append("left"))
    for kind in ("http.request", "http.request", "http.disconnect"):
        assert told == []
        server.said.put_nowait(kind)
        await until_quiet()
    assert told == ["left"]
    server.said.put_nowait("http.disconnect")
    await until_quiet()
    departure.stop()
    assert (told, server.num_received) == (["left"], 3)


async def test_who_stops_listening_is_told_nothing_whether_it_has_begun_or_not() -> None:
    server, told = Server(), list[str]()
    for num_steps in range(5):
        departure = Departure(server.receive, lambda: told.append("left"))
        for _ in range(num_steps):
            await asyncio.sleep(0)
        departure.stop()
    server.said.put_nowait("http.disconnect")
    await until_quiet()
    assert (told, server.said.qsize()) == ([], 1)
