"""Connections from candidates for an engine's stages on other hosts: each proves that it knows the
secret, gets an offer, and accepts or refuses it. Never blocks."""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import time
from collections.abc import Callable, Iterator
from functools import partial

from .host_address import tune
from .host_frames import ACCEPT, FULL, OFFER, REFUSE, FrameError, FrameReader, head, printable
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
MOST_APPLICANTS = 16
"""Most connections that have not joined yet; beyond it, the oldest one without a proof is closed.
At most one a stage has sent a proof: later ones are told that no stage is missing."""
WARN_SECONDS = 60.0
"""Seconds between two warnings about connections that fail for the same reason."""
log = logging.getLogger(__name__)


class ApplicantLeft(Exception):
    """Raised where a connection is to be closed, with the reason; an empty reason is not logged."""


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
        """Whether it has accepted; bytes after the answer are in `frames`."""
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
        """Sends data that fits into the buffer of a new connection; closes the connection
        otherwise."""
        try:
            sent = self.connection.send(data)
        except OSError as error:
            raise ApplicantLeft(f"is gone ({error.strerror})") from None
        if sent < len(data):
            raise ApplicantLeft("takes nothing")


class HostApplicants:
    """Connections of hosts that have not joined yet."""

    def __init__(
        self,
        secret: bytes,
        stages: range,
        offer_of: Callable[[int], bytes],
        on_accepted: Callable[[int, Applicant], None],
    ) -> None:
        """`offer_of` a stage is what a host gets for it. `on_accepted` is called with the stage
        that a host has accepted, and takes its connection over."""
        self._secret = secret
        self._stages = stages
        self._offer_of = offer_of
        self._on_accepted = on_accepted
        self._all: list[Applicant] = []
        self._offered: dict[int, Applicant] = {}
        """Applicant that each stage was offered to, for as long as it is connected."""
        self._warned: dict[str, float] = {}
        """Time of the last warning, by its reason."""

    def accept(self, listening: socket.socket) -> None:
        """Takes a connection that waits at the socket."""
        try:
            connection, address = listening.accept()
        except OSError:
            # The host has left again, or no descriptor is free for it.
            return
        with contextlib.suppress(OSError):
            tune(connection)
        if len(self._all) == MOST_APPLICANTS:
            oldest = next(each for each in self._all if not each.is_believed)
            self._drop(oldest, "was closed, because many others wait")
        self._all.append(Applicant(connection, str(address[0]), self._secret, self._offer_to))

    def interests(self) -> Iterator[Interest]:
        for applicant in self._all:
            yield applicant.interest(partial(self._guard, applicant, applicant.on_readable))

    def tick(self, elapsed: float) -> None:
        """Counts the seconds that an applicant may take."""
        for applicant in list(self._all):
            self._guard(applicant, partial(applicant.tick, elapsed))

    def close(self) -> None:
        for applicant in self._all:
            applicant.connection.close()

    def _offer_to(self, applicant: Applicant) -> bytes | None:
        free = [stage for stage in self._stages if stage not in self._offered]
        if not free:
            return None
        self._offered[free[0]] = applicant
        return self._offer_of(free[0])

    def _guard(self, applicant: Applicant, call: Callable[[], None]) -> None:
        if applicant not in self._all:
            return
        try:
            call()
        except (ApplicantLeft, ProofError, FrameError) as error:
            self._drop(applicant, str(error))
            return
        if applicant.has_accepted:
            self._all.remove(applicant)
            stage = next(stage for stage, each in self._offered.items() if each is applicant)
            self._on_accepted(stage, applicant)

    def _drop(self, applicant: Applicant, reason: str) -> None:
        self._all.remove(applicant)
        applicant.connection.close()
        self._offered = {
            stage: each for stage, each in self._offered.items() if each is not applicant
        }
        now = time.monotonic()
        if reason and now - self._warned.get(reason, -WARN_SECONDS) >= WARN_SECONDS:
            self._warned = {
                known: at for known, at in self._warned.items() if now - at < WARN_SECONDS
            }
            self._warned[reason] = now
            log.warning("a connection for a pipeline stage from %s %s", applicant.host, reason)
