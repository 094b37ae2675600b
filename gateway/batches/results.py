"""The results of batches' lines: one a line, whoever computes it. Knows nothing about what is in them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

import msgspec
import nats.errors
from nats.js import JetStreamContext
from nats.js.api import ConsumerConfig, DeliverPolicy

from headwater.gateway.batches.durable import (
    FAILURES,
    RESULTS,
    Durable,
    Missing,
    Rooms,
    drop_keys,
    drop_object,
    entries,
    put_once,
    value_of,
)
from headwater.gateway.batches.records import Result, new_id

IS_SUCCESS = "Headwater-Success"
NUM_BYTES = "Headwater-Bytes"
"""Headers of a result, so that counting needs no bodies."""
MAX_VALUE_BYTES = 512 * 1024
"""Of a result that lies in the bucket itself: below what the server takes in one message."""
_ELSEWHERE, _LARGE = b"@", "large"
"""What such a value begins with instead, before the name of where it lies; the keys by which they are found again."""
READ_SECONDS = 60.0
QUIET_SECONDS = 5.0
"""Without a new result, before the server is asked anew: one that restarted forgets who was listening."""
_STREAM, _SUBJECT = f"KV_{RESULTS}", f"$KV.{RESULTS}"
_results = msgspec.json.Decoder(Result)


class Results:
    def __init__(self, durable: Durable) -> None:
        self._durable = durable

    async def keep(self, batch_id: str, number: int, result: Result) -> bool:
        """False when the line had one already: the first stands."""
        rooms, value = await self._durable.rooms(), msgspec.json.encode(result)
        headers = {IS_SUCCESS: str(int(result.is_success)), NUM_BYTES: str(len(value))}
        if len(value) > MAX_VALUE_BYTES:
            value = await self._put_elsewhere(rooms, batch_id, number, value)
        return await put_once(rooms.js, f"{_SUBJECT}.{batch_id}.{number}", value, headers)

    async def has(self, batch_id: str, number: int) -> bool:
        rooms = await self._durable.rooms()
        try:
            await value_of(rooms.results, f"{batch_id}.{number}")
        except Missing:
            return False
        return True

    async def all(self, batch_id: str) -> AsyncIterator[tuple[int, bytes, bool]]:
        """(line number, the result as JSON, whether it is a success), in the order in which they came."""
        rooms = await self._durable.rooms()
        async for entry in entries(rooms.results, f"{batch_id}.>"):
            value = entry.value or b""
            if value.startswith(_ELSEWHERE):
                async with asyncio.timeout(READ_SECONDS):
                    value = (await rooms.contents.get(value.removeprefix(_ELSEWHERE).decode())).data or b""
            yield int(entry.key.rpartition(".")[2]), value, _results.decode(value).is_success

    async def drop(self, batch_id: str) -> None:
        rooms = await self._durable.rooms()
        async for entry in entries(rooms.results, f"{_LARGE}.{batch_id}.>"):
            await drop_object(rooms, (entry.value or b"").decode())
        for keys in (batch_id, f"{_LARGE}.{batch_id}"):
            await drop_keys(rooms.js, RESULTS, f"{keys}.>")

    async def _put_elsewhere(self, rooms: Rooms, batch_id: str, number: int, value: bytes) -> bytes:
        """Among the contents of files; what to keep instead. Each that computes the line has a place of its own."""
        name = new_id(f"{batch_id}-{number}-")
        await rooms.results.put(f"{_LARGE}.{batch_id}.{name}", name.encode())
        await rooms.contents.put(name, value)
        return _ELSEWHERE + name.encode()

    @contextlib.asynccontextmanager
    async def followed(self, batch_id: str) -> AsyncIterator[Follower]:
        follower = Follower(self._durable, batch_id)
        try:
            yield follower
        finally:
            await follower.close()


class Follower:
    """Tells which lines of a batch have a result, as they come."""

    def __init__(self, durable: Durable, batch_id: str) -> None:
        self._durable, self._subject = durable, f"{_SUBJECT}.{batch_id}.>"
        self._listening: JetStreamContext.PushSubscription | None = None
        self._last_sequence = 0
        self._heard_at = 0.0

    async def more(self, seconds: float) -> list[tuple[int, bool, int]]:
        """(line number, whether it is a success, its bytes) of those that are there; waits for one, not longer than
        that.

        Raises what NATS raises where it cannot be asked.
        """
        listening = self._listening or await self._listen()
        found: list[tuple[int, bool, int]] = []
        try:
            while True:
                message = await listening.next_msg(timeout=seconds)
                self._heard_at, self._last_sequence = time.monotonic(), message.metadata.sequence.stream
                number, headers = int(message.subject.rpartition(".")[2]), message.headers or {}
                found.append((number, headers.get(IS_SUCCESS) != "0", int(headers.get(NUM_BYTES, "0"))))
                if not message.metadata.num_pending:
                    return found
        except nats.errors.TimeoutError:
            if time.monotonic() - self._heard_at > QUIET_SECONDS:
                await self.close()
            return found

    async def _listen(self) -> JetStreamContext.PushSubscription:
        rooms = await self._durable.rooms()
        self._listening = await rooms.js.subscribe(
            self._subject,
            stream=_STREAM,
            ordered_consumer=True,
            config=ConsumerConfig(
                headers_only=True,
                deliver_policy=DeliverPolicy.BY_START_SEQUENCE,
                opt_start_seq=self._last_sequence + 1,
            ),
        )
        self._heard_at = time.monotonic()
        return self._listening

    async def close(self) -> None:
        listening, self._listening = self._listening, None
        if listening is not None:
            with contextlib.suppress(*FAILURES):
                await listening.unsubscribe()
