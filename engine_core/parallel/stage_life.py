"""One stage of an engine, computed on this host for as long as both live: its ranks, and the link
to the engine."""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections.abc import Mapping, Sequence
from functools import partial

from ..options import ExecutorOptions
from .board import Board
from .host_join import Joined, Stopped
from .host_link import (
    BEAT_SECONDS,
    HostLink,
    Interest,
    LinkLost,
    plan_ends,
    poll_once,
    report_ends,
)
from .rank_facts import RankLost
from .rank_processes import EXIT_SECONDS, RankProcesses
from .rank_rings import RankRings, create_rank_rings
from .rank_start import SharedMemory
from .stage_hosts import allowed_silence_of


class StageLife:
    """Owns the connection, the ranks and all that is between them."""

    def __init__(
        self,
        joined: Joined,
        options: ExecutorOptions,
        variables: Sequence[Mapping[str, str]],
        *,
        copies: bool,
    ) -> None:
        """`options` of the engine, with this host's model folder and threads; `variables` and
        `copies` as in `RankProcesses`. NOTE: where ranks are copies, nothing in this process has
        computed yet."""
        layout = options.layout
        ranks = range(joined.stage * layout.tensor, (joined.stage + 1) * layout.tensor)
        own = dict[int, RankRings]()
        opposite = list[RankRings]()
        for rank in ranks:
            own[rank], other = create_rank_rings()
            opposite.append(other)
        memory = SharedMemory.create(layout.num_ranks)
        self._processes = RankProcesses(
            options,
            own,
            memory,
            dict(zip(ranks, variables, strict=True)),
            copies=copies,
            rendezvous=joined.rendezvous,
        )
        self._link = HostLink(
            joined.connection,
            joined.frames,
            outgoing=report_ends(opposite),
            incoming=plan_ends(opposite),
            beat=partial(Board(memory.board).rows, ranks.start, layout.tensor),
            on_beat=_allow_silence,
        )
        for fd in memory:
            os.close(fd)

    def run(self, stops: Sequence[int]) -> None:
        """Raises `LinkLost` when the engine is gone, `RankLost` when a rank of this host is, and
        `Stopped` when one of the descriptors `stops` is readable."""
        self._link.take_frames()
        last = time.monotonic()
        while True:
            for call in poll_once(
                [*self._own_interests(stops), *self._link.interests()], BEAT_SECONDS / 2
            ):
                call()
            now = time.monotonic()
            elapsed = now - last
            last = now
            self._link.tick(elapsed)

    def close(self) -> None:
        """Ends the ranks at once."""
        self._processes.kill()
        self._processes.close()
        self._processes.forget()
        self._link.close()

    def _own_interests(self, stops: Sequence[int]) -> list[Interest]:
        lives = [(fd, select.POLLIN, partial(self._on_end, fd)) for fd in self._processes.lives]
        return [*lives, *((fd, select.POLLIN, _stop) for fd in stops)]

    def _on_end(self, life: int) -> None:
        """Tells the engine how a rank has ended. Raises `RankLost`."""
        rank, reason = self._processes.end_of(life)
        with contextlib.suppress(LinkLost):
            self._link.send_lost(rank, reason)
            end = time.monotonic() + EXIT_SECONDS
            while not self._link.has_sent_all and time.monotonic() < end:
                for call in poll_once(list(self._link.interests()), BEAT_SECONDS):
                    call()
        raise RankLost(rank, reason)


def _allow_silence(link: HostLink, beat: bytes) -> None:
    link.allowed_silence = allowed_silence_of(beat)


def _stop() -> None:
    raise Stopped
