"""The processes of an engine's ranks: started, sent plans, read from, watched, ended. Knows nothing
of what they compute.

One thread watches them. A rank whose process ends, and one that reports nothing for too long, ends
all of them: what the others compute without it is of no use. Everything between processes is
inherited, memory without a name and pipes, so that nobody else can reach it.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from ..options import ExecutorOptions
from ..system.ring import (
    BroadcastWriter,
    PeerGone,
    RingEnd,
    RingReader,
    create_broadcast,
    create_ring,
)
from .board import STATE_NAMES, WAITS, Board
from .rank_facts import RankLost
from .rank_processes import EXIT_SECONDS, RankProcesses
from .rank_rings import RankRings
from .rank_start import SharedMemory
from .stage_hosts import StageHosts
from .stage_rings import create_stage_rings

TICK_SECONDS = 0.1
"""Seconds between two looks at ranks that owe something."""


class _Loss:
    """The first loss of a rank. Any thread may note it or wait for it."""

    def __init__(self) -> None:
        self.lost: RankLost | None = None
        """The loss of a rank; None: all ranks run."""
        self._lock = threading.Lock()
        self._settled = threading.Event()
        self._on_lost: Callable[[RankLost], None] | None = None
        self.wake_read, self._wake_write = os.pipe()
        """Descriptor that is readable from the loss on, and from the end on."""

    def check(self) -> None:
        """Raises `RankLost` once a rank is lost."""
        if self.lost is not None:
            raise self.lost

    def note(self, lost: RankLost) -> bool:
        """Notes a loss. Returns False if another loss was noted first, which is kept."""
        with self._lock:
            if self.lost is not None:
                return False
            self.lost = lost
        return True

    def settle(self) -> None:
        """Tells everybody, once the ranks are ended."""
        self._settled.set()
        self.wake()
        if self._on_lost is not None and self.lost is not None:
            self._on_lost(self.lost)

    def on_lost(self, report: Callable[[RankLost], None]) -> None:
        self._on_lost = report
        if self.lost is not None:
            report(self.lost)

    def settled(self) -> RankLost:
        """Waits for the loss of a rank whose channel is closed, and returns it."""
        self._settled.wait(10 * EXIT_SECONDS)
        return self.lost or RankLost(-1, "has closed its channel")

    def wake(self) -> None:
        os.write(self._wake_write, b"\0")

    def close(self) -> None:
        for fd in (self.wake_read, self._wake_write):
            os.close(fd)


class Ranks:
    """One process a rank. Plans are written once for all of them."""

    def __init__(
        self,
        options: ExecutorOptions,
        num_threads: int,
        variables: Sequence[Mapping[str, str]],
        *,
        copies: bool = False,
        hosts: StageHosts | None = None,
    ) -> None:
        """`num_threads`: those that compute, of all ranks on this host together. `variables` of
        each of these, and `copies`: see `RankProcesses`. `hosts` computes the last stages, where
        some are on other hosts."""
        self.layout = layout = options.layout
        self.size = layout.num_ranks
        self.allowed_silence = 0.0
        self._num_sent = 0
        self._is_closing = False
        self._loss = _Loss()
        memory = SharedMemory.create(self.size)
        self.slots = memory.slots
        self.adapters = memory.adapters
        """Memory for adapters."""
        self.board = Board(memory.board)
        writers, rings, reports = _create_rings(options)
        self._plans = BroadcastWriter(writers, self._await_room)
        num_local = len(variables)
        self._processes = RankProcesses(
            replace(options, num_threads=num_threads),
            dict(enumerate(rings[:num_local])),
            memory,
            dict(enumerate(variables)),
            copies=copies,
            rendezvous=None if hosts is None else hosts.rendezvous,
        )
        os.close(memory.board)
        os.close(memory.exchange)
        self._reports = [RingReader(end) for end in reports]
        self._waiting: list[list[bytes]] = [[] for _ in range(self.size)]
        self._hosts = hosts
        if hosts is not None:
            hosts.start(rings[num_local:], self)
        self._watch = threading.Thread(target=self._watch_ranks, name="ranks", daemon=True)
        self._watch.start()

    @property
    def pids(self) -> list[int]:
        return self._processes.pids

    @property
    def missing_stages(self) -> list[int]:
        """Stages whose hosts have not joined and may still do so: none once a rank is lost."""
        return [] if self._hosts is None or self._loss.lost is not None else self._hosts.missing

    def await_stages(self, seconds: float) -> None:
        """Returns when none is missing, or the time is over."""
        if self._hosts is not None:
            self._hosts.await_all(seconds)

    def take_reports(self) -> None:
        """Takes what ranks have reported so far, so that none of them waits for room to report, and
        computes no plan meanwhile. Raises `RankLost`."""
        self._loss.check()
        self._read(range(self.size))

    def send(self, message: bytes) -> None:
        """Hands all ranks a message. Raises `RankLost`."""
        self._loss.check()
        self._num_sent += 1
        try:
            self._plans.write(message)
        except PeerGone:
            raise self._loss.settled() from None

    def _await_room(self, fd: int, event: int) -> None:
        """Takes what ranks report until the ring of plans has room. A rank that waits for room
        itself, behind a long result, reads no plan meanwhile."""
        poll = select.poll()
        rank_of = {reader.fileno(): rank for rank, reader in enumerate(self._reports)}
        poll.register(fd, event)
        for report in rank_of:
            poll.register(report, select.POLLIN)
        while fd not in (ready := [each for each, _ in poll.poll()]):
            for report in ready:
                if self._read([rank_of[report]]):
                    poll.unregister(report)

    def has_word(self, rank: int) -> bool:
        """Whether `hear` would return at once. Raises `RankLost`."""
        self._loss.check()
        return bool(self._waiting[rank]) or self._reports[rank].is_readable()

    def receive(self, rank: int) -> bytes:
        """Waits for the next message of a rank. Raises `RankLost`."""
        return self.receive_any([rank])[1]

    def receive_any(self, ranks: Sequence[int]) -> tuple[int, bytes]:
        """Waits for the next message of any of these ranks; returns the rank and the message.
        Raises `RankLost` when all messages before the loss are read."""
        poll = select.poll()
        for fd in (self._loss.wake_read, *(self._reports[rank].fileno() for rank in ranks)):
            poll.register(fd, select.POLLIN)
        lost: RankLost | None = None
        while True:
            is_gone = self._read(ranks)
            for rank in ranks:
                if self._waiting[rank]:
                    return rank, self._waiting[rank].pop(0)
            if lost is not None:
                raise lost
            if is_gone:
                lost = self._loss.settled()
            else:
                poll.poll()
                lost = self._loss.lost

    def _read(self, ranks: Sequence[int]) -> bool:
        """Reads what these ranks have sent. Returns whether one of them has closed its channel."""
        is_gone = False
        for rank in ranks:
            try:
                self._waiting[rank] += self._reports[rank].read()
            except PeerGone:
                is_gone = True
        return is_gone

    def allow_silence(self, seconds: float) -> None:
        """Ends all ranks when they owe an answer and none makes progress for `seconds`; 0: no
        limit."""
        self.allowed_silence = seconds

    def on_lost(self, report: Callable[[RankLost], None]) -> None:
        """Calls `report`, in a thread, as soon as a rank is lost."""
        self._loss.on_lost(report)

    def close(self) -> None:
        """Ends the ranks."""
        if self._is_closing:
            return
        self._is_closing = True
        self._plans.close()
        self._processes.close()
        if self._hosts is not None:
            self._hosts.close()
        self._loss.wake()
        self._watch.join()
        self._processes.forget()
        for reader in self._reports:
            reader.close()
        self._loss.close()
        for fd in (self.slots, self.adapters):
            os.close(fd)

    def _watch_ranks(self) -> None:
        poll = select.poll()
        lives = self._processes.lives
        for fd in (*lives, self._loss.wake_read):
            poll.register(fd, select.POLLIN | select.POLLHUP)
        silence = 0.0
        seen = self._progress()
        while not self._is_closing:
            ended = [fd for fd, _ in poll.poll(1000 * TICK_SECONDS) if fd in lives]
            if self._is_closing or self._loss.lost is not None:
                return
            if ended:
                return self.lose(*self._processes.end_of(ended[0]))
            # Counted in ticks of this thread, so that a suspended machine suspects no rank.
            now = self._progress()
            late = self._late_ranks(now)
            silence = silence + TICK_SECONDS if late and now == seen else 0.0
            seen = now
            if 0 < self.allowed_silence < silence:
                state = STATE_NAMES[self.board.state(late[0])]
                place = "" if self._hosts is None else self._hosts.place_of(late[0])
                return self.lose(
                    late[0], f"{place}{state} and has computed no plan for {silence:.1f} s"
                )

    def _progress(self) -> list[int]:
        return [figures.num_plans for figures in self.board.figures()]

    def _late_ranks(self, num_plans: list[int]) -> list[int]:
        """Ranks that have not computed all plans that they were sent, those that others wait for
        first: these wait for no rank themselves, or have not noticed yet that their wait is
        over."""
        late = [rank for rank in range(self.size) if num_plans[rank] < self._num_sent]
        return sorted(
            late, key=lambda rank: (self.board.state(rank) == WAITS, self.board.num_waits(rank))
        )

    def lose(self, rank: int, reason: str) -> None:
        """Ends all ranks, in any thread. What comes after the first loss, or while they are closed,
        changes nothing."""
        if not self._is_closing and self._loss.note(RankLost(rank, reason)):
            self._processes.kill()
            self._loss.settle()


def _create_rings(
    options: ExecutorOptions,
) -> tuple[list[RingEnd], list[RankRings], list[RingEnd]]:
    """Writing ends of the rings of plans, the ends of each rank, and reading ends of the rings of
    reports."""
    layout = options.layout
    writers, plans = create_broadcast(layout.num_ranks)
    reports = [create_ring() for _ in plans]
    rings = [RankRings(plans[rank], reports[rank][0]) for rank in range(layout.num_ranks)]
    if not options.stage_hosts:
        for each, stages in zip(rings, create_stage_rings(layout), strict=True):
            each.stages = stages
    return writers, rings, [end for _, end in reports]
