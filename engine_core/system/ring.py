"""A bounded byte ring in shared memory, one writer and one reader or several, in processes or
threads of their own.

The memory has no name, so that no death leaks it. Two pipes go with it: the writer announces the
length of each piece, the reader gives bytes back. A pipe wakes its reader (nothing is polled),
orders the two sides' view of the memory on any processor, and ends when the other side dies. Knows
nothing of what the messages mean.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import struct
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import NamedTuple

RING_BYTES = 4 << 20
_LENGTH = struct.Struct("<I")
MORE = 1 << 31
"""Flag of an announced length: the message goes on in the next piece."""
_RELEASE_EVERY = 256
"""Pieces after which the reader gives their bytes back at the latest; a pipe of one page holds more
announcements."""
_POLL_UNIT = 0.001
"""`poll` rounds a time-out up to whole milliseconds: 0.2 ms takes 1.08 (2026-11-27). `select` keeps
shorter ones."""
_SELECT_LIMIT = 1024
"""Descriptors from here on are refused by `select`."""
_COLLECT_EVERY = 64 * _RELEASE_EVERY
"""Pieces after which the writer reads the released ones from the pipe though it need not: the pipe
may have one page only."""


class PeerGone(Exception):
    """The other side of the ring has closed it or died."""


class RingEnd(NamedTuple):
    """File descriptors of one side, inherited by its process."""

    memory: int
    announce: int
    release: int

    def close(self) -> None:
        for fd in self:
            os.close(fd)


def create_broadcast(
    num_readers: int, capacity: int = RING_BYTES
) -> tuple[list[RingEnd], list[RingEnd]]:
    """The ends of one ring for each reader, the writer's and the readers'; all of them have the
    same memory."""
    first, reader = create_ring(capacity)
    writers = [first]
    readers = [reader]
    for _ in range(num_readers - 1):
        announced, announce = os.pipe()
        released, release = os.pipe()
        writers.append(RingEnd(os.dup(first.memory), announce, released))
        readers.append(RingEnd(os.dup(first.memory), announced, release))
    return writers, readers


def create_ring(capacity: int = RING_BYTES) -> tuple[RingEnd, RingEnd]:
    """The writer's and the reader's end of a new ring. None of the descriptors is inherited unless
    it is asked for."""
    memory = anonymous_memory("headwater-ring", capacity)
    announced, announce = os.pipe()
    released, release = os.pipe()
    return RingEnd(memory, announce, released), RingEnd(os.dup(memory), announced, release)


class RingWriter:
    """Puts messages of any length into the ring, in pieces where they are long. Owns its
    descriptors.

    A full ring is backpressure: `write` waits for the reader, `try_write` says False and changes
    nothing.
    """

    def __init__(self, end: RingEnd) -> None:
        self._end = end
        self._memory = _map(end)
        self._capacity = self._free = len(self._memory)
        self._at = self._num_uncollected = 0

    def fileno(self) -> int:
        """Readable when the reader gave bytes back, or is gone."""
        return self._end.release

    def write(self, message: bytes) -> None:
        """Returns when the whole message is in the ring; raises `PeerGone`."""
        for piece, flag in self.pieces(message):
            while not self.try_write(piece, flag):
                _wait_for(self._end.release, select.POLLIN)

    def pieces(self, message: bytes) -> Iterator[tuple[bytes, int]]:
        """Pieces for `try_write`, in order. One is at most a quarter of the ring, so it fits when
        all was read."""
        size = self._capacity // 4
        for start in range(0, max(len(message), 1), size):
            yield message[start : start + size], MORE if start + size < len(message) else 0

    def try_write(self, piece: bytes, flag: int = 0) -> bool:
        """Whether there was room; raises `PeerGone`."""
        if len(piece) > self._free or self._num_uncollected >= _COLLECT_EVERY:
            self._collect()
        if len(piece) > self._free:
            return False
        # The bytes go first: the announcement hands them over.
        _put(self._memory, self._at, piece)
        try:
            os.write(self._end.announce, _LENGTH.pack(len(piece) | flag))
        except BlockingIOError:
            return False
        except BrokenPipeError:
            raise PeerGone from None
        self._at = (self._at + len(piece)) % self._capacity
        self._free -= len(piece)
        self._num_uncollected += 1
        return True

    def close(self) -> None:
        """Closes this end. A second call does nothing."""
        if not self._memory.closed:
            self._memory.close()
            self._end.close()

    def _collect(self) -> None:
        self._num_uncollected = 0
        for released in _records(self._end.release):
            self._free += released


class BroadcastWriter:
    """Puts messages of any length into the ring once, for all readers. Owns its descriptors. A
    message waits until every reader has room for it."""

    def __init__(
        self, ends: list[RingEnd], wait: Callable[[int, int], object] | None = None
    ) -> None:
        """`wait` returns when an event of `poll` has come to a descriptor, and may do other things
        until then."""
        self._ends = ends
        self._memory = _map(ends[0])
        self._wait = wait or _wait_for
        for end in ends[1:]:
            for fd in (end.announce, end.release):
                os.set_blocking(fd, False)
        self._capacity = len(self._memory)
        self._free = [self._capacity] * len(ends)
        self._at = 0

    def write(self, message: bytes) -> None:
        """Returns when the whole message is in the ring; raises `PeerGone` when a reader is
        gone."""
        size = self._capacity // 4
        for start in range(0, max(len(message), 1), size):
            piece = message[start : start + size]
            self._await_room(len(piece))
            _put(self._memory, self._at, piece)
            self._at = (self._at + len(piece)) % self._capacity
            flag = MORE if start + size < len(message) else 0
            for reader, end in enumerate(self._ends):
                self._free[reader] -= len(piece)
                self._announce(end, _LENGTH.pack(len(piece) | flag))

    def close(self) -> None:
        """Closes this end. A second call does nothing."""
        if not self._memory.closed:
            self._memory.close()
            for end in self._ends:
                end.close()

    def _await_room(self, length: int) -> None:
        for reader, end in enumerate(self._ends):
            self._free[reader] += sum(_records(end.release))
            while self._free[reader] < length:
                self._wait(end.release, select.POLLIN)
                self._free[reader] += sum(_records(end.release))

    def _announce(self, end: RingEnd, record: bytes) -> None:
        while True:
            try:
                os.write(end.announce, record)
            except BlockingIOError:
                self._wait(end.announce, select.POLLOUT)
            except BrokenPipeError:
                raise PeerGone from None
            else:
                return


class RingReader:
    """Takes messages out of the ring. Owns its descriptors."""

    def __init__(self, end: RingEnd) -> None:
        self._end = end
        self._memory = _map(end)
        self._capacity = len(self._memory)
        self._at = 0
        self._unreleased = self._unreleased_pieces = 0
        self._partial = bytearray()

    def fileno(self) -> int:
        """Readable when there is a message, or the writer is gone."""
        return self._end.announce

    def wait(self, seconds: float | None = None) -> None:
        """Returns when `read` would return a message or raise, or the time is over."""
        _wait_for(self._end.announce, select.POLLIN, seconds)

    def is_readable(self) -> bool:
        """Whether `wait` would return at once."""
        return _wait_for(self._end.announce, select.POLLIN, 0)

    def read(self) -> list[bytes]:
        """The messages that are complete now, without waiting; raises `PeerGone` when there will be
        no more."""
        messages = []
        for record in _records(self._end.announce):
            piece = self._take(record & ~MORE)
            if record & MORE:
                self._partial += piece
            elif self._partial:
                messages.append(bytes(self._partial + piece))
                self._partial.clear()
            else:
                messages.append(piece)
        return messages

    def close(self) -> None:
        """Closes this end. A second call does nothing."""
        if not self._memory.closed:
            self._memory.close()
            self._end.close()

    def _take(self, length: int) -> bytes:
        until_wrap = self._capacity - self._at
        piece = self._memory[self._at : self._at + min(length, until_wrap)]
        if length > until_wrap:
            piece += self._memory[: length - until_wrap]
        self._at = (self._at + length) % self._capacity
        self._unreleased += length
        self._unreleased_pieces += 1
        # Rarely, so that the pipe holds every release that the writer has not yet had a reason to
        # collect.
        if self._unreleased > self._capacity // 8 or self._unreleased_pieces >= _RELEASE_EVERY:
            self._release()
        return piece

    def _release(self) -> None:
        # Pieces of a dead writer are still read; its end shows on the other pipe.
        with contextlib.suppress(BrokenPipeError):
            os.write(self._end.release, _LENGTH.pack(self._unreleased))
        self._unreleased = self._unreleased_pieces = 0


def anonymous_memory(name: str, size: int) -> int:
    """A descriptor of memory that no path leads to; the name is for people."""
    if sys.platform == "linux":
        fd = os.memfd_create(name)
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.ftruncate(fd, size)
    return fd


def map_at_least(memory: int, num_bytes: int) -> mmap.mmap:
    """Maps the first bytes of a descriptor's memory, which grows to so many if it has fewer."""
    if os.fstat(memory).st_size < num_bytes:
        os.ftruncate(memory, num_bytes)
    return mmap.mmap(memory, num_bytes)


def _put(memory: mmap.mmap, at: int, piece: bytes) -> None:
    """Writes a piece, wrapping around at the end of the memory."""
    until_wrap = len(memory) - at
    memory[at : at + min(len(piece), until_wrap)] = piece[:until_wrap]
    if len(piece) > until_wrap:
        memory[: len(piece) - until_wrap] = piece[until_wrap:]


def _map(end: RingEnd) -> mmap.mmap:
    for fd in (end.announce, end.release):
        os.set_blocking(fd, False)
    return mmap.mmap(end.memory, os.fstat(end.memory).st_size)


def _records(fd: int) -> list[int]:
    """The numbers that wait in a pipe; raises `PeerGone` at its end."""
    try:
        data = os.read(fd, 1 << 16)
    except BlockingIOError:
        return []
    if not data:
        raise PeerGone
    return [length for (length,) in _LENGTH.iter_unpack(data)]


def _wait_for(fd: int, event: int, seconds: float | None = None) -> bool:
    """Waits for an event of `poll`, or an end that is gone. Returns False when the time was over
    first."""
    if seconds and seconds < _POLL_UNIT and event == select.POLLIN and fd < _SELECT_LIMIT:
        return bool(select.select([fd], [], [], seconds)[0])
    poll = select.poll()
    poll.register(fd, event)
    return bool(poll.poll(None if seconds is None else seconds * 1000))
