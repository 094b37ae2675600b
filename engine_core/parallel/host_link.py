"""One connection between an engine and a host of one of its stages, which connects rings of this
host with rings of the other. Never blocks: its owner polls its descriptors and calls it."""

from __future__ import annotations

import json
import select
import socket
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import islice

from ..system.ring import RingEnd
from .host_channels import IncomingChannel, OutgoingChannel
from .host_frames import (
    BEAT,
    LAST_PIECE,
    LOST,
    PIECE,
    FrameError,
    FrameReader,
    head,
    printable,
)
from .rank_rings import RankRings

LEAST_SILENCE = 2.0
"""Seconds in which nothing may come; more where a step takes longer."""
STARTING_SILENCE = 15.0
"""The same before the engine's first plan. A process that loads libraries and kernels sends no
heartbeat meanwhile, and no answer waits for a host that hangs."""
BEAT_SECONDS = 0.2
"""Seconds between two heartbeats, also while nothing is computed."""
MOST_ELAPSED = 2 * BEAT_SECONDS
"""Most seconds of one wait that count as silence of the other host. A longer wait means that this
machine stood still, and it suspects no other."""
CLOSED = "has closed its connection"
OUT_BYTES = 1 << 20
"""Bytes of frames that wait for the socket, before rings are left alone."""
RECEIVE_BYTES = 1 << 20
MOST_BUFFERS = 16
Interest = tuple[int, int, Callable[[], object]]
"""A descriptor, events of `poll`, and what is to be called then."""


class LinkLost(Exception):
    """The other host is gone, silent, or breaks the protocol. `reason` goes on a sentence about
    it."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def plan_ends(rings: list[RankRings]) -> dict[int, RingEnd]:
    """Ends, by channel, of the rings of plans of a stage's ranks."""
    return {2 * i: each.plans for i, each in enumerate(rings)}


def report_ends(rings: list[RankRings]) -> dict[int, RingEnd]:
    """Ends, by channel, of the rings of their reports."""
    return {2 * i + 1: each.reports for i, each in enumerate(rings)}


class HostLink:
    """Owns the connection and the ends of rings. Methods raise `LinkLost`; then it can only be
    closed."""

    def __init__(
        self,
        connection: socket.socket,
        frames: FrameReader,
        outgoing: Mapping[int, RingEnd],
        incoming: Mapping[int, RingEnd],
        *,
        beat: Callable[[], bytes],
        on_beat: Callable[[HostLink, bytes], None],
    ) -> None:
        """`outgoing` and `incoming`: rings whose messages are sent to the other host, and received
        from it, by channel. `beat`: returns the payload of a heartbeat; `on_beat`: receives the
        other side's, and may raise `LinkLost`."""
        connection.setblocking(False)
        self._socket = connection
        self._frames = frames
        self._outgoing = {number: OutgoingChannel(end) for number, end in outgoing.items()}
        self._incoming = {number: IncomingChannel(end) for number, end in incoming.items()}
        self._beat = beat
        self._on_beat = on_beat
        self._out: deque[bytes | memoryview] = deque()
        self._num_out = 0
        self._silent = self._since_beat = 0.0
        self.allowed_silence = 0.0
        """Seconds; `LEAST_SILENCE` at least. 0: the engine has not sent a plan."""
        self.lost_rank: tuple[int, str] | None = None
        """A rank of the other host whose process has ended, and how."""

    def interests(self) -> Iterator[Interest]:
        events = select.POLLIN | (select.POLLOUT if self._out else 0)
        yield self._socket.fileno(), events, self._on_socket
        if self._num_out < OUT_BYTES:
            for outgoing in self._outgoing.values():
                if outgoing.takes_more:
                    yield outgoing.fileno(), select.POLLIN, partial(self._on_message, outgoing)
        for incoming in self._incoming.values():
            if incoming.waits:
                yield incoming.fileno(), select.POLLIN, incoming.write

    def tick(self, elapsed: float) -> None:
        """Takes the seconds since the last call. To be called after each round of `interests`.
        Raises `LinkLost`."""
        self._silent += min(elapsed, MOST_ELAPSED)
        allowed = max(LEAST_SILENCE, self.allowed_silence or STARTING_SILENCE)
        if self._silent > allowed:
            raise LinkLost(f"has been silent for {self._silent:.1f} s")
        self._since_beat += elapsed
        if self._since_beat >= BEAT_SECONDS:
            self._since_beat = 0.0
            self._put(BEAT, self._beat())
            self._flush()

    def send_lost(self, rank: int, reason: str) -> None:
        """Sends what is left in the rings, and that a rank of this host has ended."""
        for outgoing in self._outgoing.values():
            if outgoing.takes_more:
                outgoing.read()
        self._fill(OUT_BYTES)
        self._put(LOST, json.dumps([rank, reason]).encode())
        self._flush()

    @property
    def has_sent_all(self) -> bool:
        return not self._out

    def take_frames(self) -> None:
        """Handles the messages that have arrived. The owner calls it once, for those that came
        before this object was made."""
        while (frame := self._next()) is not None:
            kind, channel, payload = frame
            if kind in (PIECE, LAST_PIECE):
                self._take_piece(kind, channel, payload)
            elif kind == BEAT:
                self._on_beat(self, payload)
            elif kind == LOST:
                self.lost_rank = _lost_rank(payload)
            else:
                raise LinkLost(
                    f"broke the protocol: it sent a frame of kind {kind} for channel {channel}"
                )

    def close(self) -> None:
        self._socket.close()
        for outgoing in self._outgoing.values():
            outgoing.close()
        for incoming in self._incoming.values():
            incoming.close()

    def _on_socket(self) -> None:
        try:
            data = self._socket.recv(RECEIVE_BYTES)
        except BlockingIOError:
            return self._flush()
        except OSError as error:
            raise LinkLost(f"{CLOSED} ({error.strerror})") from None
        if not data:
            raise LinkLost(CLOSED)
        self._silent = 0.0
        self._frames.feed(data)
        self.take_frames()
        self._flush()

    def _next(self) -> tuple[int, int, bytes] | None:
        try:
            return self._frames.next()
        except FrameError as error:
            raise LinkLost(f"broke the protocol: it {error}") from None

    def _take_piece(self, kind: int, number: int, piece: bytes) -> None:
        channel = self._incoming.get(number)
        if channel is None:
            raise LinkLost(f"broke the protocol: it sent a message for channel {number}")
        if not channel.take(kind, piece):
            raise LinkLost(f"broke the protocol: it sent more than channel {number} has room for")

    def _on_message(self, channel: OutgoingChannel) -> None:
        channel.read()
        self._flush()

    def _put(self, kind: int, payload: bytes | memoryview, channel: int = 0) -> None:
        first = head(kind, len(payload), channel)
        self._out.append(first)
        if payload:
            self._out.append(payload)
        self._num_out += len(first) + len(payload)

    def _fill(self, most: int) -> None:
        """Takes a piece of each channel in turn, so that a long message does not hold up the
        others."""
        is_more = True
        while is_more and self._num_out < most:
            is_more = False
            for number, channel in self._outgoing.items():
                if (piece := channel.next()) is not None:
                    self._put(piece[0], piece[1], number)
                    is_more = True

    def _flush(self) -> None:
        """Sends as much as the socket takes."""
        while True:
            self._fill(OUT_BYTES)
            if not self._out:
                return
            try:
                sent = self._socket.sendmsg(list(islice(self._out, MOST_BUFFERS)))
            except BlockingIOError:
                return
            except OSError as error:
                raise LinkLost(f"{CLOSED} ({error.strerror})") from None
            self._drop(sent)

    def _drop(self, num_bytes: int) -> None:
        self._num_out -= num_bytes
        while num_bytes:
            first = self._out.popleft()
            if len(first) > num_bytes:
                self._out.appendleft(memoryview(first)[num_bytes:])
                return
            num_bytes -= len(first)


def _lost_rank(payload: bytes) -> tuple[int, str]:
    try:
        rank, reason = json.loads(payload)
        return int(rank), printable(str(reason))
    except (ValueError, TypeError):
        raise LinkLost("broke the protocol: it sent a loss that cannot be read") from None


def poll_once(interests: list[Interest], seconds: float) -> list[Callable[[], object]]:
    """Waits until some descriptor is ready, or so many seconds; returns the callbacks of those that
    are ready."""
    poll = select.poll()
    for fd, events, _ in interests:
        poll.register(fd, events)
    ready = {fd for fd, _ in poll.poll(1000 * seconds)}
    return [call for fd, _, call in interests if fd in ready]
