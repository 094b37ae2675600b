"""Divides batches into ranges of lines, which any gateway takes from a queue. Knows nothing about
their results."""

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
"""Number of file lines in one range."""


class Range(msgspec.Struct, kw_only=True):
    """Lines of a batch's file, from one on; the content of a message of the queue."""

    tenant: str
    batch_id: str
    first: int
    """Number of its first line, from 1."""
    offset: int
    """Byte offset of that line in the file."""

    def read(self, content: IO[bytes]) -> list[tuple[int, bytes]]:
        """Lines of the range that are not blank, by their number in the file."""
        content.seek(self.offset)
        return [
            (number, text)
            for number, text in enumerate(islice(content, LINES), self.first)
            if text.strip()
        ]


_ranges = msgspec.json.Decoder(Range)


class HeldRange(WorkLease):
    """A range that this process answers."""

    def __init__(self, message: Msg) -> None:
        super().__init__(message)
        self.range = _ranges.decode(message.data)


class Ranges:
    """The queue of ranges."""

    def __init__(self, durable: Durable) -> None:
        self._durable = durable

    async def put(self, each: Range) -> None:
        """Puts a range into the queue. The queue ignores one that it has already."""
        rooms = await self._durable.rooms()
        await put_once(
            rooms.js,
            subjects.batch_lines(each.batch_id, str(each.first)),
            msgspec.json.encode(each),
        )

    async def next(self) -> HeldRange:
        """Waits for the next range. Raises what NATS raises."""
        rooms = await self._durable.rooms()
        return await next_of(rooms.ranges, HeldRange)

    async def drop(self, batch_id: str) -> None:
        rooms = await self._durable.rooms()
        await rooms.js.purge_stream(LINES_QUEUE, subject=subjects.batch_lines(batch_id, ">"))


def first_of(number: int) -> int:
    """Number of the first line of the range that a line is in."""
    return number - (number - 1) % LINES


def cut(content: IO[bytes], tenant: str, batch_id: str) -> Iterator[tuple[Range, set[int]]]:
    """Ranges, in order, with the numbers of their lines that are not blank. No other reader uses
    the file meanwhile."""
    first = 1
    offset = 0
    num_bytes = 0
    numbers: set[int] = set()
    content.seek(0)
    for number, text in enumerate(content, 1):
        if first_of(number) != first:
            yield Range(tenant=tenant, batch_id=batch_id, first=first, offset=offset), numbers
            first = number
            offset = num_bytes
            numbers = set()
        num_bytes += len(text)
        if text.strip():
            numbers.add(number)
    yield Range(tenant=tenant, batch_id=batch_id, first=first, offset=offset), numbers
