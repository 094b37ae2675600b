"""Channels of a link between hosts: each carries the messages of one ring, and waits for its own
reader alone.

Messages that a reader has not taken wait at its host. Plans in flight bound their number: a rank
that falls behind is sent no further plan.
"""

from __future__ import annotations

from collections import deque

from ..system.ring import MORE, PeerGone, RingEnd, RingReader, RingWriter
from .host_frames import LAST_PIECE, PIECE, PIECE_BYTES

MOST_WAITING = 256 << 20
"""Bytes that may wait for one reader; plans in flight are far less."""
PIECE_COST = 64
"""Bytes that each piece counts in addition to its own, so that empty pieces are bounded too."""


class OutgoingChannel:
    """Messages that are read from a ring here."""

    def __init__(self, end: RingEnd) -> None:
        self._ring = RingReader(end)
        self._pieces: deque[tuple[int, memoryview]] = deque()
        self.has_ended = False
        """The ring's writer is gone."""

    def fileno(self) -> int:
        return self._ring.fileno()

    @property
    def takes_more(self) -> bool:
        """Whether the ring is to be read: what was read is sent."""
        return not self._pieces and not self.has_ended

    def read(self) -> None:
        """Takes what is in the ring."""
        try:
            messages = self._ring.read()
        except PeerGone:
            self.has_ended = True
            return
        for message in messages:
            view = memoryview(message)
            for start in range(0, max(len(message), 1), PIECE_BYTES):
                kind = PIECE if start + PIECE_BYTES < len(message) else LAST_PIECE
                self._pieces.append((kind, view[start : start + PIECE_BYTES]))

    def next(self) -> tuple[int, memoryview] | None:
        """Kind and bytes of the next piece, if there is one."""
        return self._pieces.popleft() if self._pieces else None

    def close(self) -> None:
        self._ring.close()


class IncomingChannel:
    """Messages that are written into a ring here."""

    def __init__(self, end: RingEnd) -> None:
        self._ring = RingWriter(end)
        self._pieces: deque[tuple[int, bytes]] = deque()
        self._num_waiting = 0
        """Bytes that wait for room."""
        self._has_ended = False

    def fileno(self) -> int:
        return self._ring.fileno()

    @property
    def waits(self) -> bool:
        """Whether pieces wait for room in the ring."""
        return bool(self._pieces)

    def take(self, kind: int, piece: bytes) -> bool:
        """Whether so much may wait. What a dead rank does not read is dropped."""
        if not self._has_ended:
            self._num_waiting += len(piece) + PIECE_COST
            self._pieces.append((kind, piece))
            self.write()
        return self._num_waiting <= MOST_WAITING

    def write(self) -> None:
        """Puts what waits into the ring, as far as it has room."""
        try:
            while self._pieces:
                kind, piece = self._pieces[0]
                if not self._ring.try_write(piece, MORE if kind == PIECE else 0):
                    return
                self._pieces.popleft()
                self._num_waiting -= len(piece) + PIECE_COST
        except PeerGone:
            self._has_ended = True
            self._num_waiting = 0
            self._pieces.clear()

    def close(self) -> None:
        self._ring.close()
