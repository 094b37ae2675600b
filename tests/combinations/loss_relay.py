"""In front of engines: passes bytes on until one engine has said enough, then loses its
connections, all at once."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Sequence

from tests.simulation.cluster.relay import CHUNK_BYTES, Relay


class LossRelay(Relay):
    """Counts what its engine says while `armed` holds a number of bytes."""

    def __init__(self, target: str, group: LossRelays) -> None:
        super().__init__()
        self.find = lambda: target
        self._group = group
        self._num_reported = 0

    def reset(self) -> None:
        self._num_reported = 0

    async def _up(self, client: asyncio.StreamReader, server: asyncio.StreamWriter) -> None:
        while data := await client.read(CHUNK_BYTES):
            server.write(data)
            await server.drain()

    async def _pass(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while data := await source.read(CHUNK_BYTES):
            if (limit := self._group.armed) is not None:
                data = data[: limit - self._num_reported]
                self._num_reported += len(data)
            sink.write(data)
            await sink.drain()
            if limit is not None and self._num_reported >= limit:
                self._group.armed = None
                self._lose()

    def _lose(self) -> None:
        for connection in list(self._connections):
            connection.cancel()


class LossRelays:
    """One relay an engine, on a thread of their own. At most one engine is lost each time they are
    armed."""

    def __init__(self, targets: Sequence[str]) -> None:
        self.armed: int | None = None
        """Bytes after which the engine that says them first is lost."""
        self._relays = [LossRelay(target, self) for target in targets]
        self._loop = asyncio.new_event_loop()
        self._is_over = asyncio.Event()
        self._is_listening = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        self._is_listening.wait()

    @property
    def addresses(self) -> list[str]:
        return [relay.address for relay in self._relays]

    def arm(self, num_bytes: int) -> None:
        for relay in self._relays:
            relay.reset()
        self.armed = num_bytes

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._is_over.set)
        self._thread.join()

    def _run(self) -> None:
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        async with contextlib.AsyncExitStack() as stack:
            for relay in self._relays:
                await stack.enter_async_context(relay.running())
            self._is_listening.set()
            await self._is_over.wait()
