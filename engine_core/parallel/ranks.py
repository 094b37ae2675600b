"""The processes of an engine's ranks: started, told plans, heard, watched, ended. Knows nothing of what they compute.

One thread watches them. A rank whose process ends, and one that says nothing for too long, ends all of them: what the
others compute without it is of no use. Everything between processes is inherited, memory without a name and pipes, so
that nobody else can reach it.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Protocol

from ..options import ExecutorOptions
from ..rank_facts import RankLost
from ..ring import BroadcastWriter, PeerGone, RingReader, anonymous_memory, create_broadcast, create_ring
from .board import STATE_NAMES, WAITS, Board, create_board
from .copied_process import CopiedProcess
from .memory_group import create_group
from .rank_start import RankStart
from .stage_rings import create_stage_rings

MODULE = "headwater.engine_core.executors.rank_process"
TICK_SECONDS = 0.1
"""Between two looks at ranks that owe something."""
EXIT_SECONDS = 1.0
"""What ranks are given to end by themselves."""


class Process(Protocol):
    """Methods of `subprocess.Popen` that `Ranks` uses."""

    @property
    def pid(self) -> int: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def kill(self) -> None: ...


class Ranks:
    """One process a rank. Plans are written once for all of them."""

    def __init__(
        self,
        options: ExecutorOptions,
        num_threads: int,
        variables: Sequence[Mapping[str, str]],
        *,
        copies: bool = False,
    ) -> None:
        """`num_threads`: those that compute, of all ranks together. `variables` of each rank's environment come beside
        those of this process. `copies`: ranks are copies of this process, which saves what they would import; else each
        has an interpreter of its own."""
        self.layout = layout = options.layout
        self.size = layout.num_ranks
        self._allowed_silence = 0.0
        self._num_told = 0
        self._is_closing = False
        self._lost: RankLost | None = None
        self._settled = threading.Event()
        self._on_lost: Callable[[RankLost], None] | None = None
        self._wake_read, self._wake_write = os.pipe()
        memory = create_board(self.size)
        self.slots = anonymous_memory("headwater-slots", 0)
        self.board = Board(memory)
        writers, plan_readers = create_broadcast(self.size)
        self._plans = BroadcastWriter(writers)
        lifelines = [os.pipe() for _ in range(self.size)]
        lives = [os.pipe() for _ in range(self.size)]
        reports = [create_ring() for _ in range(self.size)]
        groups = [end for _ in range(layout.pipeline) for end in create_group(layout.tensor)]
        links = create_stage_rings(layout)
        options = replace(options, num_threads=max(1, num_threads // self.size))
        self._processes: list[Process] = []
        for rank in range(self.size):
            start = RankStart(
                rank=rank,
                options=options,
                plans=plan_readers[rank],
                reports=reports[rank][0],
                group=groups[rank],
                stream_in=links[rank].stream_in,
                stream_out=links[rank].stream_out,
                tokens_in=links[rank].tokens_in,
                tokens_out=links[rank].tokens_out,
                board=memory,
                slots=self.slots,
                lifeline=lifelines[rank][0],
                life=lives[rank][1],
            )
            begin = _copied if copies else _started
            self._processes.append(begin(start, variables[rank]))
        # The ranks have these; here they would keep a dead rank's pipes open.
        for rank in range(self.size):
            plan_readers[rank].close()
            reports[rank][0].close()
            groups[rank].close()
            links[rank].close()
            os.close(lifelines[rank][0])
            os.close(lives[rank][1])
        os.close(memory)
        self._lifelines = [held for _, held in lifelines]
        self._lives = [watched for watched, _ in lives]
        self._reports = [RingReader(end) for _, end in reports]
        self._waiting: list[list[bytes]] = [[] for _ in range(self.size)]
        self._watch = threading.Thread(target=self._watch_ranks, name="ranks", daemon=True)
        self._watch.start()

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def tell(self, message: bytes) -> None:
        """Hands all ranks a message. Raises `RankLost`."""
        if self._lost is not None:
            raise self._lost
        self._num_told += 1
        try:
            self._plans.write(message)
        except PeerGone:
            raise self._loss() from None

    def has_word(self, rank: int) -> bool:
        """Whether `hear` would return at once. Raises `RankLost`."""
        if self._lost is not None:
            raise self._lost
        return bool(self._waiting[rank]) or self._reports[rank].is_readable()

    def hear(self, rank: int) -> bytes:
        """Waits for the next message of a rank. Raises `RankLost`."""
        waiting, reader = self._waiting[rank], self._reports[rank]
        while not waiting:
            poll = select.poll()
            poll.register(reader.fileno(), select.POLLIN)
            poll.register(self._wake_read, select.POLLIN)
            poll.poll()
            try:
                waiting += reader.read()
            except PeerGone:
                raise self._loss() from None
            if self._lost is not None and not waiting:
                raise self._lost
        return waiting.pop(0)

    def allow_silence(self, seconds: float) -> None:
        """From now on, while ranks owe an answer, all of them are ended when none of them gets on for so long; 0: they
        may be silent for ever."""
        self._allowed_silence = seconds

    def on_lost(self, tell: Callable[[RankLost], None]) -> None:
        """Has `tell` called, in a thread, as soon as a rank is lost."""
        self._on_lost = tell
        if self._lost is not None:
            tell(self._lost)

    def close(self) -> None:
        """Ends the ranks."""
        if self._is_closing:
            return
        self._is_closing = True
        self._plans.close()
        for fd in self._lifelines:
            os.close(fd)
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(EXIT_SECONDS)
        for process in self._processes:
            process.kill()
            process.wait()
        os.write(self._wake_write, b"\0")
        self._watch.join()
        for reader in self._reports:
            reader.close()
        for fd in (*self._lives, self._wake_read, self._wake_write, self.slots):
            os.close(fd)

    def _loss(self) -> RankLost:
        """Why a rank does not answer. The watch says so right after."""
        self._settled.wait(EXIT_SECONDS)
        return self._lost or RankLost(-1, "has closed its channel")

    def _watch_ranks(self) -> None:
        poll = select.poll()
        for fd in (*self._lives, self._wake_read):
            poll.register(fd, select.POLLIN | select.POLLHUP)
        silence, seen = 0.0, self._progress()
        while not self._is_closing:
            ended = [self._lives.index(fd) for fd, _ in poll.poll(1000 * TICK_SECONDS) if fd in self._lives]
            if self._is_closing:
                return
            if ended:
                return self._lose(ended[0], _end_of(self._processes[ended[0]]))
            # Ticks of this thread, so that a machine that stood still suspects nobody.
            now = self._progress()
            late = self._late_ranks(now)
            silence = silence + TICK_SECONDS if late and now == seen else 0.0
            seen = now
            if 0 < self._allowed_silence < silence:
                state = STATE_NAMES[self.board.state(late[0])]
                return self._lose(late[0], f"{state} and has computed no plan for {silence:.1f} s")

    def _progress(self) -> list[int]:
        return [figures.num_plans for figures in self.board.figures()]

    def _late_ranks(self, num_plans: list[int]) -> list[int]:
        """Ranks that were told plans which they have not computed. First those that others wait for: they do not wait
        themselves, or have not noticed yet that their wait is over."""
        late = [rank for rank in range(self.size) if num_plans[rank] < self._num_told]
        return sorted(late, key=lambda rank: (self.board.state(rank) == WAITS, self.board.num_waits(rank)))

    def _lose(self, rank: int, reason: str) -> None:
        self._lost = RankLost(rank, reason)
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        self._settled.set()
        os.write(self._wake_write, b"\0")
        if self._on_lost is not None:
            self._on_lost(self._lost)


def _started(start: RankStart, variables: Mapping[str, str]) -> subprocess.Popen[bytes]:
    threads = str(start.options.num_threads)
    return subprocess.Popen(
        [sys.executable, "-m", MODULE, start.to_json()],
        stdin=subprocess.DEVNULL,
        env=os.environ | {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, **variables},
        pass_fds=start.descriptors,
    )


def _copied(start: RankStart, variables: Mapping[str, str]) -> CopiedProcess:
    assert not variables, "a copy has the environment of this process"
    return CopiedProcess(partial(import_module(MODULE).run_rank, start), start.descriptors)


def _end_of(process: Process) -> str:
    try:
        status = process.wait(EXIT_SECONDS)
    except subprocess.TimeoutExpired:
        return "has closed its pipes"
    return f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
