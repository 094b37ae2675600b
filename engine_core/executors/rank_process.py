"""The process of one rank: computes the plans that all ranks of an engine are told, in their
order."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

import torch

from ..config import ConfigError
from ..executor import Executor, Int32Array, StepResult, Swapper, SwapPlan
from ..parallel.board import COMPUTES, IDLE, WAITS, Board
from ..parallel.memory_group import MemoryGroup
from ..parallel.plan_messages import (
    DRAW,
    PREPARE,
    STEP,
    SWAP,
    decode_draw,
    decode_step,
    decode_swap,
    kind_of,
)
from ..parallel.rank_start import RankStart
from ..parallel.result_messages import (
    Hello,
    Loading,
    RankPrepared,
    Refusal,
    WarmedUp,
    Warned,
    encode_result,
    encode_told,
)
from ..platforms import loading as platforms
from ..system.ring import PeerGone, RingEnd, RingReader, RingWriter
from .build.request import checked
from .build.single import rank_executor
from .ranks.rank import Rank, stages_of
from .ranks.result_thread import ResultThread
from .ranks.stage_link import Receiver, StageLinks
from .tiers.copy_thread import CopyThread


class RankProcess:
    def __init__(self, start: RankStart) -> None:
        self._start = start
        self._board = Board(start.memory.board)
        self._plans = RingReader(start.rings.plans)
        self._reports = RingWriter(start.rings.reports)
        self._shard = start.options.layout.shard(start.rank)
        self._group = MemoryGroup(self._shard.index, start.group, self._say_waits)
        self._receivers: list[Receiver] = []
        self._masks: Int32Array | None = None
        """As the last draw had them."""
        self._later_copies: CopyThread | None = None
        """Copies that end after `swap` has returned; None where none do."""
        self._is_counting = threading.Lock()
        self._is_reporting = threading.Lock()

    def run(self) -> None:
        """Runs plans until the executor closes their ring, or another rank is gone."""
        executor, launches = self._built()
        later = ResultThread(executor, self._take) if launches else None
        if launches and executor.swapper is not None:
            self._later_copies = CopyThread(executor.swapper, self._note_copies)
        while True:
            self._plans.wait()
            for message in self._plans.read():
                self._board.set_state(self._start.rank, COMPUTES)
                start = time.perf_counter()
                handle = self._handle(executor, message)
                if handle is not None and later is not None:
                    later.add(handle, start)
                    continue
                if handle is not None:
                    self._tell(executor.retire(handle))
                self._is_computed(time.perf_counter() - start)

    def _built(self) -> tuple[Executor, bool]:
        """The executor, and whether it launches work on a device. Raises `SystemExit` where the
        rank is refused, and says why."""
        options = self._start.options
        try:
            device = platforms.load(options.device).device
            request = checked(options, device.name, device.capabilities)
            stage_index = options.layout.stage_index(self._start.rank)
            rank = Rank(
                shard=self._shard,
                stage_index=stage_index,
                stage=stages_of(request)[stage_index],
                group=self._group,
                links=self._links(),
                slots=self._start.memory.slots,
                exchange=self._start.memory.exchange,
                warn=self._warn,
            )
            executor, config = rank_executor(device, request, rank, self._say_loading)
        except ConfigError as error:
            self._report(
                encode_told(Refusal(name=error.name, value=str(error.value), allowed=error.allowed))
            )
            raise SystemExit(1) from None
        hello = Hello(
            config=config,
            can_draft=executor.can_draft,
            copies_blocks=executor.copies_blocks,
            prefill_seconds=executor.prefill_seconds,
            seconds_per_block=0.0
            if executor.swapper is None
            else executor.swapper.seconds_per_block,
        )
        self._report(encode_told(hello))
        return executor, device.capabilities.graphs

    def _handle(self, executor: Executor, message: bytes) -> int | None:
        """Does what a message wants. The handle of a plan, which is to be retired."""
        kind = kind_of(message)
        if kind == STEP:
            return executor.submit(decode_step(message))
        if kind == DRAW:
            plan = decode_draw(message, self._masks)
            self._masks = plan.masks
            return executor.draw(plan)
        if kind == SWAP:
            assert executor.swapper is not None
            self._swap(executor.swapper, decode_swap(message))
        elif kind == PREPARE:
            prepared = RankPrepared(is_more_left=executor.prepare())
            if self._is_speaker:
                self._report(encode_told(prepared))
        else:
            self._report(encode_told(WarmedUp(seconds=executor.warm_up())))
        return None

    def _swap(self, swapper: Swapper, plan: SwapPlan) -> None:
        """Copies blocks. The step that wrote them may not have ended on this rank, though the
        speaker has its result. But that result depends on what every rank sends after its last
        layer's keys and values are written: its part of a sum, or the stream of its stage."""
        swapper.swap(plan)
        if self._later_copies is not None:
            self._later_copies.add(plan)
        else:
            self._note_copies(swapper.num_saved, swapper.num_loaded)

    def _note_copies(self, num_saved: int, num_loaded: int) -> None:
        self._board.note_copies(self._start.rank, num_saved, num_loaded)

    def _take(self, result: StepResult, seconds: float) -> None:
        self._tell(result)
        self._is_computed(seconds)

    def _is_computed(self, seconds: float) -> None:
        # Results are taken in a thread, copies and preparations are counted in another: no plan may
        # be lost.
        with self._is_counting:
            self._board.set_state(self._start.rank, IDLE)
            self._board.note_plan(self._start.rank, seconds, self._seconds_waited)

    def _tell(self, result: StepResult) -> None:
        """All ranks of the last stage have the same result: one of them says it."""
        if self._is_speaker:
            self._report(encode_result(result))

    def _report(self, message: bytes) -> None:
        # A ring has one writer at a time: results are told in a thread, all else by the one that
        # runs plans.
        with self._is_reporting:
            self._reports.write(message)

    @property
    def _is_speaker(self) -> bool:
        return self._start.rank == self._start.options.layout.speaker

    def _say_loading(self, phase: str, done: int, total: int) -> None:
        # One rank of each stage reports: stages may load on other hosts.
        if self._shard.index == 0:
            self._report(encode_told(Loading(phase=phase, done=done, total=total)))

    def _warn(self, text: str) -> None:
        if self._is_speaker:
            self._report(encode_told(Warned(text=text)))

    def _links(self) -> StageLinks:
        rings = self._start.rings.stages
        return StageLinks(
            stream_in=self._receiver(rings.stream_in),
            stream_out=None if rings.stream_out is None else RingWriter(rings.stream_out),
            tokens_in=self._receiver(rings.tokens_in),
            tokens_out=[RingWriter(end) for end in rings.tokens_out],
        )

    def _receiver(self, end: RingEnd | None) -> Receiver | None:
        if end is None:
            return None
        self._receivers.append(Receiver(RingReader(end), self._say_waits))
        return self._receivers[-1]

    @property
    def _seconds_waited(self) -> float:
        return self._group.seconds_waited + sum(each.seconds_waited for each in self._receivers)

    def _say_waits(self, waits: bool) -> None:
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
        # The executor closes or another rank is gone. The executor sees which, and ends this one
        # either way.
        threading.Event().wait()


def _die_with_the_executor(lifeline: int) -> None:
    """Ends the process when the executor dies: at once, also while the model loads or another rank
    is awaited."""
    os.read(lifeline, 1)
    os._exit(0)


if __name__ == "__main__":
    main()
