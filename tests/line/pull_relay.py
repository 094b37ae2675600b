"""In front of an engine that lends blocks: passes bytes on, and breaks or holds the connections
that carry blocks once they have passed a number of bytes. Sessions with the engine go on."""

from __future__ import annotations

import asyncio
import threading
from types import TracebackType

from tests.simulation.cluster.relay import CHUNK_BYTES, Relay

SERVICE = b"headwater.v1.Blocks"
"""In the first request of a connection that carries blocks."""


class PullRelay(Relay):
    """Relay on a thread of its own, for the length of a scope."""

    def __init__(self) -> None:
        super().__init__()
        self.num_cuts = self.num_passed = 0
        """Connections that were broken or held, and bytes of blocks that were passed on since
        `cut_after`."""
        self._limit: int | None = None
        self._holds = False
        self._pulls: set[asyncio.StreamReader] = set()
        """The lender's ends of connections that carry blocks."""
        self._loop = asyncio.new_event_loop()
        self._is_over = asyncio.Event()
        self._is_listening = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> PullRelay:
        self._thread.start()
        self._is_listening.wait()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._loop.call_soon_threadsafe(self._is_over.set)
        self._thread.join()
        self._loop.close()

    def cut_after(self, num_bytes: int, *, holds: bool = False) -> None:
        """Breaks the next connection that has passed so many bytes of blocks from now on. `holds`:
        it stays open, and nothing passes any more."""
        self.num_passed = 0
        self._holds = holds
        self._limit = num_bytes

    def _run(self) -> None:
        self._loop.run_until_complete(self._serve())

    async def _serve(self) -> None:
        async with self.running():
            self._is_listening.set()
            await self._is_over.wait()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        target = self.find()
        assert target is not None
        host, _, port = target.rpartition(":")
        lender, to_lender = await asyncio.open_connection(host, int(port))
        ways = [
            asyncio.create_task(self._ask(reader, to_lender, lender)),
            asyncio.create_task(self._answer(lender, writer)),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            self._pulls.discard(lender)
            to_lender.transport.abort()

    async def _ask(
        self,
        client: asyncio.StreamReader,
        to_lender: asyncio.StreamWriter,
        lender: asyncio.StreamReader,
    ) -> None:
        while data := await client.read(CHUNK_BYTES):
            if SERVICE in data:
                self._pulls.add(lender)
            to_lender.write(data)
            await to_lender.drain()

    async def _answer(self, lender: asyncio.StreamReader, client: asyncio.StreamWriter) -> None:
        while data := await lender.read(CHUNK_BYTES):
            if lender in self._pulls:
                if self._limit is not None and self.num_passed + len(data) > self._limit:
                    client.write(data[: self._limit - self.num_passed])
                    await client.drain()
                    await self._cut()
                    return
                self.num_passed += len(data)
            client.write(data)
            await client.drain()

    async def _cut(self) -> None:
        self.num_cuts = self.num_cuts + 1
        self._limit = None
        if self._holds:
            await asyncio.Event().wait()
