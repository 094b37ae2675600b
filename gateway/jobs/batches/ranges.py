"""Batches cut into ranges of lines, which any gateway takes from a queue. Knows nothing about what becomes of them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import IO

import msgspec
from nats.aio.msg import Msg

from headwater.services.runtime import subjects

from ...buckets import put_once
from ..durable import LINES_QUEUE, Durable
from ..work_lease import WorkLease, next_of

LINES = 16
"""Lines of a file in one range."""


class Range(msgspec.Struct, kw_only=True):
    """Lines of a batch's file, from one on; the content of a message of the queue."""

    tenant: str
    batch_id: str
    first: int
    """Number of its first line, from 1."""
    offset: int
    """Offset of that line in the file, in bytes."""

    def read(self, content: IO[bytes]) -> list[tuple[int, bytes]]:
        """Its lines that hold something, by their number in the file."""
        content.seek(self.offset)
        return [(number, text) for number, text in enumerate(islice(content, LINES), self.first) if text.strip()]


_ranges = msgspec.json.Decoder(Range)


class HeldRange(WorkLease):
    """Lines that this process answers."""

    def __init__(self, message: Msg) -> None:
        super().__init__(message)
        self.range = _ranges.decode(message.data)


class Ranges:
    """The queue."""

    def __init__(self, durable: Durable) -> None:
        self._durable = durable

    async def put(self, each: Range) -> None:
        """Once, however often it is put before it is done."""
        rooms = await self._durable.rooms()
        await put_once(rooms.js, subjects.batch_lines(each.batch_id, str(each.first)), msgspec.json.encode(each))

    async def next(self) -> HeldRange:
        """Waits for one. Raises what NATS raises."""
        rooms = await self._durable.rooms()
        return await next_of(rooms.ranges, HeldRange)

    async def drop(self, batch_id: str) -> None:
        rooms = await self._durable.rooms()
        await rooms.js.purge_stream(LINES_QUEUE, subject=subjects.batch_lines(batch_id, ">"))


def first_of(number: int) -> int:
    """The first line of the range that a line is in."""
    return number - (number - 1) % LINES


def cut(content: IO[bytes], tenant: str, batch_id: str) -> Iterator[tuple[Range, set[int]]]:
    """Ranges, in order, with the numbers of their lines that hold something. Nobody else reads the file meanwhile."""
    first, offset, num_bytes = 1, 0, 0
    numbers: set[int] = set()
    content.seek(0)
    for number, text in enumerate(content, 1):
        if first_of(number) != first:
            yield Range(tenant=tenant, batch_id=batch_id, first=first, offset=offset), numbers
            first, offset, numbers = number, num_bytes, set()
        num_bytes += len(text)
        if text.strip():
            numbers.add(number)
    yield Range(tenant=tenant, batch_id=batch_id, first=first, offset=offset), numbers
