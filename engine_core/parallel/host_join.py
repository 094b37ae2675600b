"""How a host joins an engine: connects, proves that it knows the secret, has the engine prove it
too, and gets the offer of a stage."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .host_address import parse_address, tune
from .host_frames import ACCEPT, FULL, OFFER, REFUSE, FrameError, FrameReader, head
from .host_proof import (
    BELIEVED,
    ENGINE,
    HELLO_BYTES,
    PROOF_SECONDS,
    REPLY_BYTES,
    STAGE,
    ProofError,
    check_hello,
    check_proof,
    new_hello,
    proof,
)
from .rendezvous import Rendezvous

SETTING = "join"
CONNECT_SECONDS = 3.0
MOST_REASON = 2000
"""Letters of a reason."""


class Stopped(Exception):
    """Raised when one of the descriptors that stop this host is readable."""


class EngineAway(Exception):
    """Raised where no engine has a stage for this host now; the host tries again."""


class JoinRefused(Exception):
    """This host and the engine do not belong together, and why."""


@dataclass(frozen=True, slots=True)
class Joined:
    connection: socket.socket
    frames: FrameReader
    stage: int
    offer: str
    rendezvous: Rendezvous

    def accept(self) -> None:
        """Raises `EngineAway`."""
        try:
            self.connection.sendall(head(ACCEPT, 0))
        except OSError as error:
            raise EngineAway(f"the engine is gone ({error.strerror})") from None

    def refuse(self, reason: str) -> None:
        payload = reason[:MOST_REASON].encode()
        with contextlib.suppress(OSError):
            self.connection.sendall(head(REFUSE, len(payload)) + payload)


class Waiting:
    """Waits for descriptors, unless one of `stops` is readable."""

    def __init__(self, stops: Sequence[int]) -> None:
        self._stops = stops

    def pause(self, seconds: float) -> None:
        """Raises `Stopped`."""
        self.until(None, select.POLLIN, time.monotonic() + seconds)

    def until(self, fd: int | None, events: int, deadline: float) -> bool:
        """Whether the descriptor was ready before the time was over. Raises `Stopped`."""
        poll = select.poll()
        for stop in self._stops:
            poll.register(stop, select.POLLIN)
        if fd is not None:
            poll.register(fd, events)
        ready = {found for found, _ in poll.poll(max(0.0, 1000 * (deadline - time.monotonic())))}
        if not ready.isdisjoint(self._stops):
            raise Stopped
        return fd in ready


def join(address: str, secret: bytes, waiting: Waiting) -> Joined:
    """Raises `Stopped`, `EngineAway` and `JoinRefused`, and `ConfigError` for what is no
    address."""
    connection = _connected(address, waiting)
    try:
        receiver = _Receiver(connection, address, waiting, time.monotonic() + PROOF_SECONDS)
        _prove(receiver, secret)
        stage, offer, host, port = _offer(receiver)
        # Ranks of this host are reached as it reaches the engine.
        rendezvous = Rendezvous(host, port, str(connection.getsockname()[0]))
        return Joined(connection, receiver.frames, stage, offer, rendezvous)
    except OSError as error:
        connection.close()
        raise EngineAway(f"the engine at {address} is gone ({error.strerror})") from None
    except BaseException:
        connection.close()
        raise


def _connected(address: str, waiting: Waiting) -> socket.socket:
    """A connection to the first of the name's addresses where something listens: an engine listens
    at one of them."""
    host, port = parse_address(SETTING, address)
    try:
        places = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise EngineAway(f"no engine is at {address} ({error.strerror})") from None
    failed = ""
    for family, kind, protocol, _, place in places:
        try:
            return _connected_to(place, socket.socket(family, kind, protocol), waiting)
        except OSError as error:
            failed = error.strerror or str(error)
    raise EngineAway(f"no engine is at {address} ({failed})")


def _connected_to(
    place: tuple[Any, ...], connection: socket.socket, waiting: Waiting
) -> socket.socket:
    """Raises `OSError`."""
    try:
        connection.setblocking(False)
        tune(connection)
        failed = connection.connect_ex(place)
        if failed == errno.EINPROGRESS:
            if not waiting.until(
                connection.fileno(), select.POLLOUT, time.monotonic() + CONNECT_SECONDS
            ):
                failed = errno.ETIMEDOUT
            else:
                failed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if failed:
            raise OSError(failed, os.strerror(failed))
    except BaseException:
        connection.close()
        raise
    return connection


class _Receiver:
    """Reads an exact number of bytes, with one deadline for all reads."""

    def __init__(
        self, connection: socket.socket, address: str, waiting: Waiting, deadline: float
    ) -> None:
        self.connection = connection
        self.address = address
        self.frames = FrameReader()
        self._waiting = waiting
        self._deadline = deadline

    def some(self, most: int) -> bytes:
        if not self._waiting.until(self.connection.fileno(), select.POLLIN, self._deadline):
            raise EngineAway(f"the engine at {self.address} has not answered in time")
        data = self.connection.recv(most)
        if not data:
            raise EngineAway(f"the engine at {self.address} has closed the connection")
        return data

    def exactly(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            data += self.some(count - len(data))
        return data


def _prove(receiver: _Receiver, secret: bytes) -> None:
    own = new_hello()
    receiver.connection.sendall(own)
    try:
        engine = receiver.exactly(HELLO_BYTES)
        check_hello(engine)
        receiver.connection.sendall(proof(secret, STAGE, own, engine))
        reply = receiver.exactly(REPLY_BYTES)
        if reply[:1] != BELIEVED:
            raise ProofError("does not believe this host: it has another secret")
        check_proof(reply[1:], secret, ENGINE, own, engine)
    except ProofError as error:
        raise JoinRefused(f"the engine at {receiver.address} {error}") from None


def _offer(receiver: _Receiver) -> tuple[int, str, str, int]:
    """The stage, what it is to compute, and host and port of the engine's store."""
    try:
        while (frame := receiver.frames.next()) is None:
            receiver.frames.feed(receiver.some(1 << 16))
        if frame.kind == FULL:
            raise EngineAway(f"the engine at {receiver.address} has a host for each of its stages")
        if frame.kind != OFFER:
            raise FrameError(f"sent a frame of kind {frame.kind}")
        stage, offer, host, port = json.loads(frame.payload)
        return int(stage), str(offer), str(host), int(port)
    except (FrameError, ValueError) as error:
        raise JoinRefused(f"the engine at {receiver.address} broke the protocol: {error}") from None
