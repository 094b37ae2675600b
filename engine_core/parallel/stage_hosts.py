"""The hosts that compute an engine's last pipeline stages: they join over sockets, and a thread
moves messages between these and the rings of their ranks. Knows nothing of what the messages
mean."""

from __future__ import annotations

import json
import logging
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Protocol

from ..weights.shards import ParallelLayout
from .board import Board
from .host_applicant import Applicant, HostApplicants
from .host_link import (
    BEAT_SECONDS,
    HostLink,
    Interest,
    LinkLost,
    plan_ends,
    poll_once,
    report_ends,
)
from .rank_rings import RankRings
from .rendezvous import Rendezvous
from .rendezvous_store import RendezvousStore

_ALLOWED_SILENCE = struct.Struct("<d")
log = logging.getLogger(__name__)


class RankWatch(Protocol):
    """Watch over ranks, which learns of the progress and the loss of those on other hosts."""

    board: Board
    allowed_silence: float

    def lose(self, rank: int, reason: str) -> None: ...


class StageHosts:
    """Hosts of an engine's other stages, one a stage. `lose` is called once for a host that is
    lost, which is not used afterwards."""

    def __init__(
        self,
        listening: socket.socket,
        secret: bytes,
        layout: ParallelLayout,
        num_hosts: int,
        offer: str,
    ) -> None:
        """`offer`: what a host is to compute and to compare, for it to read."""
        self._listening = listening
        self._layout = layout
        self._store = RendezvousStore(listening)
        self.rendezvous = self._store.rendezvous
        self.stages = range(layout.pipeline - num_hosts, layout.pipeline)
        self._applicants = HostApplicants(
            secret, self.stages, partial(_offered, offer, self.rendezvous), self._join
        )
        self._hosts: dict[int, str] = {}
        self._links: dict[int, HostLink] = {}
        self._rings: dict[int, list[RankRings]] = {}
        self._wake_read, self._wake_write = os.pipe()
        self._has_joined = threading.Condition()
        self._is_closing = False
        self._thread: threading.Thread | None = None

    def start(self, rings: Sequence[RankRings], watch: RankWatch) -> None:
        """`rings`: the ends that ranks of these stages would have; they are closed here."""
        size = self._layout.tensor
        for i, stage in enumerate(self.stages):
            self._rings[stage] = list(rings[i * size : (i + 1) * size])
        self._watch = watch
        self._store.serve()
        self._thread = threading.Thread(target=self._run, name="stage hosts", daemon=True)
        self._thread.start()

    @property
    def missing(self) -> list[int]:
        """Stages whose hosts have not joined."""
        return [stage for stage in self.stages if stage not in self._hosts]

    def await_all(self, seconds: float) -> None:
        """Returns when every stage has its host, or the time is over."""
        with self._has_joined:
            self._has_joined.wait_for(lambda: not self.missing, seconds)

    def end_rendezvous(self) -> None:
        """Closes the rendezvous store; called once all ranks are connected."""
        self._store.close()

    def place_of(self, rank: int) -> str:
        """Name of a rank's stage and host, for a sentence about it; empty: the rank is on this
        host."""
        stage = self._layout.stage_index(rank)
        return f"(stage {stage} on {self._hosts[stage]}) " if stage in self._hosts else ""

    def close(self) -> None:
        self._is_closing = True
        os.write(self._wake_write, b"\0")
        if self._thread is not None:
            self._thread.join()
        self._listening.close()
        self._store.close()
        self._applicants.close()
        for link in self._links.values():
            link.close()
        for stage, rings in self._rings.items():
            if stage not in self._links:
                for each in rings:
                    each.close()
        for fd in (self._wake_read, self._wake_write):
            os.close(fd)

    def _run(self) -> None:
        try:
            self._move()
        finally:
            if not self._is_closing:
                # A fault of ours, which the thread's trace shows. Without it the engine would wait
                # for ever.
                self._lose(
                    self.stages.start * self._layout.tensor,
                    "is lost: no messages are moved any more",
                )

    def _move(self) -> None:
        last = time.monotonic()
        while not self._is_closing:
            for call in poll_once(list(self._interests()), BEAT_SECONDS / 2):
                call()
            now = time.monotonic()
            elapsed = now - last
            last = now
            self._applicants.tick(elapsed)
            for stage, link in self._links.items():
                link.allowed_silence = self._watch.allowed_silence
                if not self._guard_link(stage, partial(link.tick, elapsed)):
                    return

    def _interests(self) -> Iterator[Interest]:
        yield self._wake_read, select.POLLIN, lambda: None
        accept = partial(self._applicants.accept, self._listening)
        yield self._listening.fileno(), select.POLLIN, accept
        yield from self._applicants.interests()
        for stage, link in self._links.items():
            for fd, events, call in link.interests():
                yield fd, events, partial(self._guard_link, stage, call)

    def _join(self, stage: int, applicant: Applicant) -> None:
        rings = self._rings[stage]
        self._links[stage] = link = HostLink(
            applicant.connection,
            applicant.frames,
            outgoing=plan_ends(rings),
            incoming=report_ends(rings),
            beat=lambda: _ALLOWED_SILENCE.pack(self._watch.allowed_silence),
            on_beat=partial(self._note_board, stage),
        )
        with self._has_joined:
            self._hosts[stage] = applicant.host
            self._has_joined.notify_all()
        log.info("stage %d is computed on %s", stage, applicant.host)
        self._guard_link(stage, link.take_frames)

    def _note_board(self, stage: int, link: HostLink, rows: bytes) -> None:
        if not self._watch.board.set_rows(stage * self._layout.tensor, self._layout.tensor, rows):
            raise LinkLost(f"broke the protocol: it sent {len(rows)} bytes of progress")

    def _guard_link(self, stage: int, call: Callable[[], object]) -> bool:
        """Whether the link is still good."""
        if self._is_closing:
            return False
        first = stage * self._layout.tensor
        link = self._links[stage]
        try:
            call()
        except LinkLost as lost:
            self._lose(first, lost.reason)
            return False
        if link.lost_rank is not None:
            rank, reason = link.lost_rank
            self._lose(min(max(rank, first), first + self._layout.tensor - 1), reason)
            return False
        return True

    def _lose(self, rank: int, reason: str) -> None:
        """Notes that a rank is lost. The engine ends with it, so no more messages are moved."""
        self._is_closing = True
        self._watch.lose(rank, f"{self.place_of(rank)}{reason}")


def _offered(offer: str, rendezvous: Rendezvous, stage: int) -> bytes:
    """The offer of a stage, as its host reads it."""
    host, port, _ = rendezvous
    return json.dumps([stage, offer, host, port]).encode()


def allowed_silence_of(beat: bytes) -> float:
    """Seconds, from an engine's heartbeat. Raises `LinkLost`."""
    if len(beat) != _ALLOWED_SILENCE.size:
        raise LinkLost(f"broke the protocol: it sent a heartbeat of {len(beat)} bytes")
    (seconds,) = _ALLOWED_SILENCE.unpack(beat)
    return float(seconds)
