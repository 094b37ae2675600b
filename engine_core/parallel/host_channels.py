"""Channels of a link between hosts: each carries the messages of one ring, and waits for its own
reader alone.

A sender has a window of bytes that the other side has not taken yet, as large as a ring. So a full
ring is backpressure here as between processes of one host, and no channel waits for another.
"""

from __future__ import annotations

from collections import deque

from ..system.ring import MORE, RING_BYTES, PeerGone, RingEnd, RingReader, RingWriter
from .host_frames import LAST_PIECE, PIECE, PIECE_BYTES

WINDOW_BYTES = RING_BYTES
PIECE_COST = 64
"""Bytes that a piece costs beside its own, so that empty ones are bounded too."""


class OutgoingChannel:
    """Messages that are read from a ring here."""

    def __init__(self, end: RingEnd) -> None:
        self._ring = RingReader(end)
        self._pieces: deque[tuple[int, memoryview]] = deque()
        self._window = WINDOW_BYTES
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
        """Kind and bytes of the next piece, if the window has room for it."""
        if not self._pieces or (cost := len(self._pieces[0][1]) + PIECE_COST) > self._window:
            return None
        self._window -= cost
        return self._pieces.popleft()

    def on_consumed(self, num_bytes: int) -> None:
        self._window = min(self._window + num_bytes, WINDOW_BYTES)

    def close(self) -> None:
        self._ring.close()


class IncomingChannel:
    """Messages that are written into a ring here."""

    def __init__(self, end: RingEnd) -> None:
        self._ring = RingWriter(end)
        self._pieces: deque[tuple[int, bytes]] = deque()
        self._num_waiting = self._num_consumed = 0
        """Bytes that wait for room, and those that the sender has not been told of."""
        self._has_ended = False

    def fileno(self) -> int:
        return self._ring.fileno()

    @property
    def waits(self) -> bool:
        """Whether pieces wait for room in the ring."""
        return bool(self._pieces)

    def take(self, kind: int, piece: bytes) -> bool:
        """Whether the sender may send so much. What a dead rank does not read is dropped."""
        if self._has_ended:
            return True
        self._num_waiting += len(piece) + PIECE_COST
        if self._num_waiting + self._num_consumed > WINDOW_BYTES:
            return False
        self._pieces.append((kind, piece))
        self.write()
        return True

    def write(self) -> None:
        """Puts what waits into the ring, as far as it has room."""
        try:
            while self._pieces:
                kind, piece = self._pieces[0]
                if not self._ring.try_write(piece, MORE if kind == PIECE else 0):
                    return
                self._pieces.popleft()
                self._num_waiting -= len(piece) + PIECE_COST
                self._num_consumed += len(piece) + PIECE_COST
        except PeerGone:
            self._has_ended = True
            self._pieces.clear()

    def consumed(self) -> int:
        """Bytes that the sender is to be told of now; 0: not yet."""
        if self._num_consumed < WINDOW_BYTES // 8:
            return 0
        count = self._num_consumed
        self._num_consumed = 0
        return count

    def close(self) -> None:
        self._ring.close()
