"""A relay between two processes: passes bytes on, holds them like a cut network, or delays them.

The relay in front of NATS also knows its protocol, and loses, doubles and reorders cache events
alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable

CHUNK_BYTES = 1 << 16
KV_EVENTS = b"kv."
"""Prefix of the subjects of cache events."""


class Relay:
    """Relay that listens on a port of its own for as long as it lives, whichever process is behind
    it."""

    def __init__(self) -> None:
        self.address = ""
        self.find: Callable[[], str | None] = lambda: None
        """Returns the address of the process behind it, host:port, if there is one."""
        self.delay = 0.0
        """Seconds by which everything is delayed."""
        self._is_whole = asyncio.Event()
        self._is_whole.set()
        self._connections: set[asyncio.Task[None]] = set()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Relay]:
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()
        self.address = f"{host}:{port}"
        try:
            yield self
        finally:
            server.close()
            for connection in list(self._connections):
                connection.cancel()
            await asyncio.gather(*self._connections, return_exceptions=True)

    def cut(self) -> None:
        """Cuts connections: they stay open and nothing passes."""
        self._is_whole.clear()

    def mend(self) -> None:
        """Ends a cut: held bytes pass now."""
        self._is_whole.set()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            await self._connect(reader, writer)
        except (OSError, asyncio.IncompleteReadError):
            # Either side has gone; so does the other.
            pass
        except asyncio.CancelledError:
            # The relay ends. NOTE: asyncio's server would log it, were it raised.
            pass
        finally:
            writer.transport.abort()
            self._connections.discard(task)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._is_whole.wait()
        if (target := self.find()) is None:
            return
        host, _, port = target.rpartition(":")
        there, back = await asyncio.open_connection(host, int(port))
        directions = [
            asyncio.create_task(each)
            for each in (self._up(reader, back), self._pass(there, writer))
        ]
        try:
            done, _ = await asyncio.wait(directions, return_when=asyncio.FIRST_COMPLETED)
            for direction in done:
                direction.result()
        finally:
            # Before anything is awaited: who cancels a second time ends that.
            back.transport.abort()
            for direction in directions:
                direction.cancel()
            await asyncio.gather(*directions, return_exceptions=True)

    async def _up(self, client: asyncio.StreamReader, server: asyncio.StreamWriter) -> None:
        await self._pass(client, server)

    async def _pass(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while data := await source.read(CHUNK_BYTES):
            await self._weather()
            sink.write(data)
            await sink.drain()

    async def _weather(self) -> None:
        if self.delay:
            await asyncio.sleep(self.delay)
        await self._is_whole.wait()


class NatsRelay(Relay):
    """Relay in front of NATS. `storm` is the generator that decides about each batch of cache
    events while there is one."""

    DROP = 0.3
    DOUBLE = 0.2
    LATE_SECONDS = 0.05

    def __init__(self) -> None:
        super().__init__()
        self.storm: random.Random | None = None

    async def _up(self, client: asyncio.StreamReader, server: asyncio.StreamWriter) -> None:
        """Passes messages one by one: `PUB subject [reply] bytes` or `HPUB subject [reply]
        header-bytes bytes`, then these."""
        while line := await client.readline():
            words = line.split()
            is_message = bool(words) and words[0].upper() in (b"PUB", b"HPUB")
            frame = line + (await client.readexactly(int(words[-1]) + 2) if is_message else b"")
            await self._weather()
            if self.storm is not None and is_message and words[1].startswith(KV_EVENTS):
                self._toss(self.storm, frame, server)
            else:
                server.write(frame)
            await server.drain()

    def _toss(self, storm: random.Random, frame: bytes, server: asyncio.StreamWriter) -> None:
        for _ in range(
            0 if storm.random() < self.DROP else 2 if storm.random() < self.DOUBLE else 1
        ):
            asyncio.get_running_loop().call_later(
                storm.uniform(0, self.LATE_SECONDS), self._write, server, frame
            )

    @staticmethod
    def _write(server: asyncio.StreamWriter, frame: bytes) -> None:
        if not server.is_closing():
            server.write(frame)
