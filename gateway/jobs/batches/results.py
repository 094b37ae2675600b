"""The results of batches' lines: one a line, however often it is computed. Knows nothing about
their content."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator, Mapping

import msgspec

from headwater.services.runtime.refusals import Refusals

from ...buckets import Missing, drop_object
from ..durable import CONTENTS, RESULTS, Durable, Rooms
from ..event_log import EventLog, LogReader
from .records import Result, new_id

IS_SUCCESS = "Headwater-Success"
NUM_BYTES = "Headwater-Bytes"
SEAL = "Headwater-Seal"
"""Headers of a result, which allow counting without bodies; the last one is the seal of the
others."""
MAX_VALUE_BYTES = 512 * 1024
"""Largest number of bytes of a result in the bucket itself: below the server's largest message."""
_ELSEWHERE = b"@"
_LARGE = "large"
"""Prefix of a value that refers to a stored object, before the object's name; also the prefix of
keys of such objects."""
READ_SECONDS = 60.0
_STREAM = f"KV_{RESULTS}"
_SUBJECT = f"$KV.{RESULTS}"
_results = msgspec.json.Decoder(Result)
_refusals = Refusals("record")


class Results:
    def __init__(self, durable: Durable) -> None:
        self._durable = durable

    async def keep(self, batch_id: str, number: int, result: Result) -> bool:
        """Keeps the result of a line. Returns False when the line had one already: the first
        stands."""
        rooms = await self._durable.rooms()
        value = msgspec.json.encode(result)
        key = f"{batch_id}.{number}"
        headers = {IS_SUCCESS: str(int(result.is_success)), NUM_BYTES: str(len(value))}
        headers[SEAL] = rooms.results.seals.code(_headers_of(key), _sealed_bytes(headers)).decode()
        if len(value) > MAX_VALUE_BYTES:
            value = await self._put_elsewhere(rooms, batch_id, number, value)
        return await rooms.results.put_once(key, value, headers)

    async def has(self, batch_id: str, number: int) -> bool:
        rooms = await self._durable.rooms()
        try:
            await rooms.results.get(f"{batch_id}.{number}")
        except Missing:
            return False
        return True

    async def all(self, batch_id: str) -> AsyncIterator[tuple[int, bytes, bool]]:
        """(line number, result as JSON, whether it is a success), in the order of their arrival."""
        rooms = await self._durable.rooms()
        async for key, value in rooms.results.all(f"{batch_id}.>"):
            whole = await self._elsewhere(rooms, value) if value.startswith(_ELSEWHERE) else value
            if whole is None:
                _refusals.add("forged", key=key)
                continue
            yield int(key.rpartition(".")[2]), whole, _results.decode(whole).is_success

    async def drop(self, batch_id: str) -> None:
        rooms = await self._durable.rooms()
        async for _, name in rooms.results.all(f"{_LARGE}.{batch_id}.>"):
            await drop_object(rooms.js, CONTENTS, name.decode())
        for keys in (batch_id, f"{_LARGE}.{batch_id}"):
            await rooms.results.drop(f"{keys}.>")

    async def _put_elsewhere(self, rooms: Rooms, batch_id: str, number: int, value: bytes) -> bytes:
        """Stores a large result as an object; returns the value that refers to it. Each process
        that computes the line writes an object of its own."""
        name = new_id(f"{batch_id}-{number}-")
        await rooms.results.put(f"{_LARGE}.{batch_id}.{name}", name.encode())
        await rooms.contents.put(name, value)
        return _ELSEWHERE + f"{hashlib.sha256(value).hexdigest()} {name}".encode()

    async def _elsewhere(self, rooms: Rooms, value: bytes) -> bytes | None:
        """Result that a value refers to. None where the object was replaced and has no seal."""
        digest, _, name = value.removeprefix(_ELSEWHERE).decode().rpartition(" ")
        async with asyncio.timeout(READ_SECONDS):
            whole = (await rooms.contents.get(name)).data or b""
        return whole if digest in ("", hashlib.sha256(whole).hexdigest()) else None

    @contextlib.asynccontextmanager
    async def followed(self, batch_id: str) -> AsyncIterator[Follower]:
        log = EventLog(self._durable, _STREAM, f"{_SUBJECT}.{batch_id}.>")
        async with log.reader(headers_only=True) as reader:
            yield Follower(self._durable, reader)


class Follower:
    """Reports the lines of a batch that have a result, as they come."""

    def __init__(self, durable: Durable, reader: LogReader) -> None:
        self._durable = durable
        self._reader = reader
        # Kept where reading fails between two results: the reader gives each once.
        self._found: list[tuple[int, bool, int]] = []

    async def more(self, seconds: float) -> list[tuple[int, bool, int]]:
        """(line number, whether it is a success, its bytes) of the new results; waits for one, at
        most `seconds`.

        Raises what NATS raises when it is out of reach.
        """
        seals = (await self._durable.rooms()).results.seals
        while (message := await self._reader.next(seconds)) is not None:
            key = message.subject.removeprefix(f"{_SUBJECT}.")
            headers = message.headers or {}
            # A line whose only result is forged is still in the queue, with its range.
            if (
                seals.open_beside(
                    _headers_of(key), headers.get(SEAL, "").encode(), _sealed_bytes(headers)
                )
                is not None
            ):
                is_success = headers.get(IS_SUCCESS) != "0"
                num_bytes = int(headers.get(NUM_BYTES, "0"))
                self._found.append((int(key.rpartition(".")[2]), is_success, num_bytes))
            if not message.metadata.num_pending:
                break
        found = self._found
        self._found = []
        return found


def _headers_of(key: str) -> str:
    """Key of the seal of a result's headers, different from that of its value."""
    return f"{key} headers"


def _sealed_bytes(headers: Mapping[str, str]) -> bytes:
    """Bytes that the headers' seal covers."""
    return f"{headers.get(IS_SUCCESS, '')} {headers.get(NUM_BYTES, '')}".encode()
