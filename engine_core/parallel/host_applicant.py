"""A connection to an engine from what may be a host for one of its stages: proves that it knows the
secret, gets an offer and accepts or refuses it. Never waits."""

from __future__ import annotations

import select
import socket
from collections.abc import Callable

from .host_frames import ACCEPT, FULL, OFFER, REFUSE, FrameReader, head, printable
from .host_link import Interest
from .host_proof import (
    BELIEVED,
    HELLO_BYTES,
    PROOF_BYTES,
    PROOF_SECONDS,
    REFUSED,
    STAGE,
    ProofError,
    check_hello,
    check_proof,
    new_hello,
    proof,
)
from .host_proof import ENGINE as ENGINE_ROLE

CHECK_SECONDS = 60.0
"""Time that a host has to compare its model and its libraries with the offer."""
RECEIVE_BYTES = 64 << 10


class ApplicantLeft(Exception):
    """The connection comes to nothing, and why: to be closed. An empty reason is not worth a
    word."""


class Applicant:
    """Methods raise `ApplicantLeft` and `ProofError`."""

    def __init__(
        self,
        connection: socket.socket,
        host: str,
        secret: bytes,
        offer: Callable[[Applicant], bytes | None],
    ):
        """`host`: where it comes from. `offer` is asked once it is believed: the bytes of an offer,
        or None where no stage is missing."""
        connection.setblocking(False)
        self.connection = connection
        self.host = host
        self.frames = FrameReader()
        self._secret = secret
        self._offer = offer
        self._stage_hello = b""
        self._proof = b""
        self._engine_hello = new_hello()
        self.is_believed = False
        """Whether it has proved the secret."""
        self.has_accepted = False
        """Bytes that came behind are in `frames`."""
        self.seconds_left = PROOF_SECONDS

    def interest(self, call: Callable[[], None]) -> Interest:
        return self.connection.fileno(), select.POLLIN, call

    def tick(self, elapsed: float) -> None:
        self.seconds_left -= elapsed
        if self.seconds_left <= 0:
            raise ApplicantLeft("has not answered in time")

    def on_readable(self) -> None:
        if self.is_believed:
            self.frames.feed(self._receive(RECEIVE_BYTES))
            return self._take_answer()
        # Not a byte more than the proof has, before it is believed.
        if len(self._stage_hello) < HELLO_BYTES:
            self._stage_hello += self._receive(HELLO_BYTES - len(self._stage_hello))
            check_hello(self._stage_hello)
            if len(self._stage_hello) == HELLO_BYTES:
                self._send(self._engine_hello)
            return None
        self._proof += self._receive(PROOF_BYTES - len(self._proof))
        if len(self._proof) == PROOF_BYTES:
            self._believe()
        return None

    def _believe(self) -> None:
        hellos = self._stage_hello, self._engine_hello
        try:
            check_proof(self._proof, self._secret, STAGE, *hellos)
        except ProofError:
            self._send(REFUSED + bytes(PROOF_BYTES))
            raise
        self.is_believed = True
        self.seconds_left = CHECK_SECONDS
        self._send(BELIEVED + proof(self._secret, ENGINE_ROLE, *hellos))
        offer = self._offer(self)
        if offer is None:
            self._send(head(FULL, 0))
            raise ApplicantLeft("")
        self._send(head(OFFER, len(offer)) + offer)

    def _take_answer(self) -> None:
        frame = self.frames.next()
        if frame is None:
            return
        if frame.kind == REFUSE:
            raise ApplicantLeft(f"refuses: {printable(frame.payload.decode(errors='replace'))}")
        if frame.kind != ACCEPT:
            raise ApplicantLeft(f"answered an offer with a frame of kind {frame.kind}")
        self.has_accepted = True

    def _receive(self, most: int) -> bytes:
        try:
            data = self.connection.recv(most)
        except BlockingIOError:
            return b""
        except OSError as error:
            raise ApplicantLeft(f"is gone ({error.strerror})") from None
        if not data:
            raise ApplicantLeft("has closed its connection before it joined")
        return data

    def _send(self, data: bytes) -> None:
        """A new connection has room for all that is said here, or it is not what it should be."""
        try:
            sent = self.connection.send(data)
        except OSError as error:
            raise ApplicantLeft(f"is gone ({error.strerror})") from None
        if sent < len(data):
            raise ApplicantLeft("takes nothing")
