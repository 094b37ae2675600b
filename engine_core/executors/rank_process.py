"""The process of one rank: computes the plans that all ranks of an engine are sent, in their
order."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable

import torch

from ..config import ConfigError
from ..executor import DrawPlan, Executor, Int32Array, StepPlan, StepResult, SwapPlan
from ..parallel.board import COMPUTES, IDLE, WAITS, Board
from ..parallel.memory_group import MemoryGroup
from ..parallel.plan_messages import PREPARE, decode
from ..parallel.rank_start import RankStart
from ..parallel.rank_waits import RankWaits
from ..platforms import loading as platforms
from ..system.ring import PeerGone, RingReader
from .build.request import checked
from .build.single import rank_executor
from .ranks.rank import Rank, stages_of
from .ranks.rank_reports import RankReports
from .ranks.rank_results import ResultsAtOnce, ResultThread
from .ranks.stage_link import open_links
from .tiers.copy_thread import CopyThread


class RankProcess:
    def __init__(self, start: RankStart) -> None:
        self._start = start
        self._board = Board(start.memory.board)
        self._plans = RingReader(start.rings.plans)
        self._reports = RankReports(start)
        self._waits = RankWaits(self._note_waiting)
        self._shard = start.options.layout.shard(start.rank)
        self._group = MemoryGroup(self._shard.index, start.group, self._waits)
        self._masks: Int32Array | None = None
        """Masks of the last draw."""
        self._is_counting = threading.Lock()

    def run(self) -> None:
        """Runs plans until the executor closes their ring, or another rank is gone."""
        executor, launches = self._built()
        results = (ResultThread if launches else ResultsAtOnce)(executor, self._take)
        note_copies = self._copy_notes(executor, launches=launches)
        while True:
            self._plans.wait()
            for message in self._plans.read():
                self._board.set_state(self._start.rank, COMPUTES)
                start = time.perf_counter()
                match plan := decode(message, self._masks):
                    case StepPlan():
                        results.add(executor.submit(plan), start)
                    case DrawPlan():
                        self._masks = plan.masks
                        results.add(executor.draw(plan), start)
                    case SwapPlan():
                        self._swap(executor, plan, note_copies)
                        self._note_computed(time.perf_counter() - start)
                    case _:
                        self._get_ready(executor, plan)
                        self._note_computed(time.perf_counter() - start)

    def _built(self) -> tuple[Executor, bool]:
        """The executor, and whether it launches work on a device. Raises `SystemExit` where the
        rank is refused, and reports why."""
        options = self._start.options
        try:
            device = platforms.load(options.device).device
            request = checked(options, device.name, device.capabilities)
            stage_index = options.layout.stage_index(self._start.rank)
            links = open_links(self._start, self._waits)
            rank = Rank(
                shard=self._shard,
                stage_index=stage_index,
                stage=stages_of(request)[stage_index],
                group=self._group,
                links=links,
                slots=self._start.memory.slots,
                exchange=self._start.memory.exchange,
                adapters=self._start.memory.adapters,
                warn=self._reports.warned,
            )
            executor, config = rank_executor(device, request, rank, self._reports.loading)
            links.connect()
        except ConfigError as error:
            self._reports.refused(error)
            raise SystemExit(1) from None
        self._reports.started(executor, config)
        return executor, device.capabilities.graphs

    def _get_ready(self, executor: Executor, kind: int) -> None:
        if kind == PREPARE:
            self._reports.prepared(executor.prepare())
        else:
            self._reports.warmed_up(executor.warm_up())

    def _swap(
        self, executor: Executor, plan: SwapPlan, note_copies: Callable[[SwapPlan], None]
    ) -> None:
        """Copies blocks. This rank may still compute the step that wrote them, though the leader
        has its result: that result depends on data that every rank sends after it has written the
        keys and values of its last layer."""
        assert executor.swapper is not None
        executor.swapper.swap(plan)
        note_copies(plan)

    def _copy_notes(self, executor: Executor, *, launches: bool) -> Callable[[SwapPlan], None]:
        """Notes how many blocks are copied, once the copies of a plan have ended: in a thread where
        they end after `swap` has returned."""
        swapper = executor.swapper
        if launches and swapper is not None:
            return CopyThread(swapper, self._note_copies).add

        def note(plan: SwapPlan) -> None:
            assert swapper is not None
            self._note_copies(swapper.num_saved, swapper.num_loaded)

        return note

    def _note_copies(self, num_saved: int, num_loaded: int) -> None:
        self._board.note_copies(self._start.rank, num_saved, num_loaded)

    def _take(self, result: StepResult, seconds: float) -> None:
        self._reports.result(result)
        self._note_computed(seconds)

    def _note_computed(self, seconds: float) -> None:
        # Results are taken in a thread, copies and preparations are counted in another: no plan may
        # be lost.
        with self._is_counting:
            self._board.set_state(self._start.rank, IDLE)
            self._board.note_plan(self._start.rank, seconds, self._waits.seconds)

    def _note_waiting(self, waits: bool) -> None:
        self._board.set_state(self._start.rank, WAITS if waits else COMPUTES)


def main() -> None:
    run_rank(RankStart.from_json(sys.argv[1]))


def run_rank(start: RankStart) -> None:
    """Runs the process of a rank. Returns only where it is not ended."""
    # The executor's process decides when to stop; a terminal's signal to the group reaches it too.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.Thread(target=_die_with_the_executor, args=(start.lifeline,), daemon=True).start()
    torch.set_num_threads(start.options.num_threads)
    try:
        RankProcess(start).run()
    except PeerGone:
        # Waits to be killed: the executor closes, or it sees that another rank is gone.
        threading.Event().wait()


def _die_with_the_executor(lifeline: int) -> None:
    """Ends the process when the executor dies: at once, also while the model loads or another rank
    is awaited."""
    os.read(lifeline, 1)
    os._exit(0)


if __name__ == "__main__":
    main()
