"""Commands on their way to the core, in order: what the ring has no room for waits here."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable

from headwater.engine_core.system.ring import PeerGone, RingWriter

MAX_BACKLOG_BYTES = 16 << 20
"""Bytes of commands that wait for room in the ring; beyond them new requests are refused."""


class CommandQueue:
    def __init__(self, ring: RingWriter, note_sent: Callable[[], None]) -> None:
        """`note_sent` is called with each command, while `lock` is held."""
        self._ring = ring
        self._note_sent = note_sent
        self._loop = asyncio.get_running_loop()
        self.lock = threading.Lock()
        """Held to send, to check or compare queued commands, and to close the queue."""
        self._has_ended = False
        self.num_sent = 0
        self._backlog: deque[tuple[bytes, int]] = deque()
        self._num_backlog_bytes = 0

    def send(self, message: bytes) -> None:
        """Sends a message; callable from any thread. After the end nothing is sent."""
        with self.lock, contextlib.suppress(PeerGone):
            if self._has_ended:
                return
            self.num_sent += 1
            self._note_sent()
            for piece, flag in self._ring.pieces(message):
                if self._backlog or not self._ring.try_write(piece, flag):
                    self._wait_for_room(piece, flag)

    @property
    def is_congested(self) -> bool:
        return self._num_backlog_bytes > MAX_BACKLOG_BYTES

    def end(self) -> None:
        """Sends nothing more; the caller holds the lock."""
        self._has_ended = True
        asyncio.get_running_loop().remove_reader(self._ring.fileno())
        self._ring.close()

    def _wait_for_room(self, piece: bytes, flag: int) -> None:
        if not self._backlog:
            self._loop.call_soon_threadsafe(self._await_room)
        self._backlog.append((piece, flag))
        self._num_backlog_bytes += len(piece)

    def _await_room(self) -> None:
        if not self._has_ended:
            asyncio.get_running_loop().add_reader(self._ring.fileno(), self._on_room)

    def _on_room(self) -> None:
        with self.lock:
            try:
                while self._backlog and self._ring.try_write(*self._backlog[0]):
                    self._num_backlog_bytes -= len(self._backlog.popleft()[0])
            except PeerGone:
                self._backlog.clear()
                self._num_backlog_bytes = 0
            if not self._backlog:
                asyncio.get_running_loop().remove_reader(self._ring.fileno())
