"""Attacks over REST, on plain sockets: what is sent is what the attack says, byte for byte."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass

from .attack import CLOSED, NO_ANSWER, Target
from .posts import Builder, Post


@dataclass(frozen=True, slots=True)
class Posts:
    """Clients that send requests one after another, each on a new connection."""

    build: Builder
    connections: int = 4
    pause: float = 0.2
    """Seconds between an answer and the next request of a connection."""
    bytes_per_second: float | None = None
    """Pace at which a body is sent; None: at once."""

    def prepare(self, model: str) -> None:
        self.build(model, 0)

    async def run(self, target: Target, seen: Counter[str]) -> None:
        async with asyncio.TaskGroup() as group:
            for number in range(self.connections):
                group.create_task(self._send_on(target, number, seen))

    async def _send_on(self, target: Target, number: int, seen: Counter[str]) -> None:
        idx = number
        while True:
            outcome = NO_ANSWER
            try:
                post = self.build(target.model, idx)
                outcome = await self._status(target, post)
            finally:
                seen[outcome] += 1
            idx += self.connections
            await asyncio.sleep(self.pause)

    async def _status(self, target: Target, post: Post) -> str:
        """Status of one request, when all of its answer has come."""
        try:
            reader, writer = await asyncio.open_connection(*target.rest_address)
        except OSError:
            return CLOSED
        sending = asyncio.ensure_future(self._send(writer, head_of(target, post), post.body))
        try:
            line = await reader.readline()
            await reader.read()
        except OSError:
            return CLOSED
        finally:
            sending.cancel()
            writer.transport.abort()
        return line.split(b" ", 2)[1].decode() if line.startswith(b"HTTP/") else CLOSED

    async def _send(self, writer: asyncio.StreamWriter, head: bytes, body: bytes) -> None:
        writer.write(head)
        if self.bytes_per_second is None:
            writer.write(body)
            return
        for byte in body:
            writer.write(bytes((byte,)))
            await asyncio.sleep(1 / self.bytes_per_second)


@dataclass(frozen=True, slots=True)
class OpenHeads:
    """Connections with half a request head, which never complete."""

    connections: int

    def prepare(self, model: str) -> None:
        pass

    async def run(self, target: Target, seen: Counter[str]) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(self.connections):
                group.create_task(self._hold(target, seen))

    async def _hold(self, target: Target, seen: Counter[str]) -> None:
        outcome = NO_ANSWER
        writer = None
        try:
            reader, writer = await asyncio.open_connection(*target.rest_address)
            writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: ")
            await reader.read()
            outcome = CLOSED
        except OSError:
            outcome = CLOSED
        finally:
            seen[outcome] += 1
            if writer is not None:
                writer.transport.abort()


def head_of(target: Target, post: Post) -> bytes:
    """Request line and headers. The length of the body is among them, unless the request names a
    transfer coding."""
    host, port = target.rest_address
    headers = {
        "host": f"{host}:{port}",
        "authorization": f"Bearer {target.key}",
        "content-type": "application/json",
        "connection": "close",
    }
    if "transfer-encoding" not in post.headers:
        headers["content-length"] = str(len(post.body))
    headers |= post.headers
    lines = [f"POST {post.path} HTTP/1.1", *(f"{name}: {text}" for name, text in headers.items())]
    return "\r\n".join((*lines, "", "")).encode()
