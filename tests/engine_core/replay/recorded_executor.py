"""An executor behind a recorder of all calls.

What a scheduler sees of time is drawn by lot here: when a plan is done, and when copies have ended.
So the calls of a seed do not depend on how fast the machine is.
"""

from __future__ import annotations

import time
from collections import deque

from headwater.engine_core.executor import (
    DirectCopies,
    DrawPlan,
    Executor,
    StepPlan,
    StepResult,
    Swapper,
    SwapPlan,
    UInt8Array,
)
from tests.engine_core.replay.calls import (
    AwaitCopies,
    Call,
    Retire,
    Submit,
    Swap,
    kept,
    kept_draw,
    outcome_of,
    sampled_rows,
)
from tests.engine_core.replay.loads import Lot

MOST_COPIES = 4
"""Copies that end between two looks, at most."""
MOST_SECONDS = 60.0
"""In which copies of small blocks end, on a busy machine too."""
PAUSE = 0.0005


class RecordedExecutor:
    """See `Executor`."""

    computes_at_once = False
    prefill_seconds = 0.0

    def __init__(self, executor: Executor, seed: int, late_polls: int) -> None:
        """`late_polls`: the most polls after which a plan is reported as done."""
        self.calls: list[Call] = []
        self.copies_blocks = executor.copies_blocks
        self.can_draft = executor.can_draft
        self.swapper: Swapper | None = None
        self._executor = executor
        self._lot = Lot(seed)
        self._late_polls = late_polls
        self._in_flight: deque[tuple[int, list[int]]] = deque()
        """Handles, with the rows that sample."""
        self._polls_left: dict[int, int] = {}
        """By handle."""
        if executor.swapper is not None:
            self.swapper = RecordedSwapper(executor.swapper, self.calls, self._lot)

    def submit(self, plan: StepPlan) -> int:
        self.calls.append(Submit(kept(plan)))
        return self._note(self._executor.submit(plan), plan)

    def draw(self, plan: DrawPlan) -> int:
        self.calls.append(kept_draw(plan))
        return self._note(self._executor.draw(plan), plan)

    def _note(self, handle: int, plan: StepPlan | DrawPlan) -> int:
        self._in_flight.append((handle, sampled_rows(plan)))
        self._polls_left[handle] = self._lot.upto(self._late_polls)
        return handle

    def retire(self, handle: int) -> StepResult:
        oldest, rows = self._in_flight.popleft()
        assert oldest == handle
        del self._polls_left[handle]
        result = self._executor.retire(handle)
        self.calls.append(Retire(handle, outcome_of(rows, result)))
        return result

    def is_ready(self, handle: int) -> bool:
        self._polls_left[handle] -= 1
        return self._polls_left[handle] < 0

    def warm_up(self) -> float:
        return 0.0

    def prepare(self) -> bool:
        return False

    def close(self) -> None:
        """The executor stays open: other streams follow."""


class RecordedSwapper:
    """See `Swapper`. Copies are reported some at a time, after they have really ended."""

    seconds_per_block = 0.0
    direct_copies: DirectCopies | None = None

    def __init__(self, swapper: Swapper, calls: list[Call], lot: Lot) -> None:
        self.slots: UInt8Array = swapper.slots
        self._copies = EndedCopies(swapper)
        self._swapper = swapper
        self._calls = calls
        self._lot = lot
        self._num_asked = [0, 0]
        """Copies out and in."""
        self._num_done = [0, 0]

    def swap(self, plan: SwapPlan) -> None:
        self._calls.append(Swap(kept(plan)))
        self._num_asked[0] += plan.out_blocks.size
        self._num_asked[1] += plan.in_blocks.size
        self._swapper.swap(plan)

    @property
    def num_saved(self) -> int:
        return self._advanced(0)

    @property
    def num_loaded(self) -> int:
        return self._advanced(1)

    def _advanced(self, way: int) -> int:
        before = self._num_done[way]
        after = min(self._num_asked[way], before + self._lot.upto(MOST_COPIES))
        if after > before:
            self._num_done[way] = after
            self._copies.wait(*self._num_done)
            self._calls.append(AwaitCopies(*self._num_done))
        return after


class EndedCopies:
    """Waits for copies of a swapper, counted from here on; none may be on its way."""

    def __init__(self, swapper: Swapper) -> None:
        self._swapper = swapper
        self._first = swapper.num_saved, swapper.num_loaded

    def wait(self, num_saved: int, num_loaded: int) -> None:
        """Raises `TimeoutError`."""
        deadline = time.monotonic() + MOST_SECONDS
        while (
            self._swapper.num_saved < self._first[0] + num_saved
            or self._swapper.num_loaded < self._first[1] + num_loaded
        ):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{num_saved} saves or {num_loaded} loads of blocks do not end")
            time.sleep(PAUSE)
