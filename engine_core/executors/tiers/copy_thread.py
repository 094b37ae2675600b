"""Counts in a thread which copies of a rank's blocks have ended: they end after `swap` has
returned, also while the rank is told nothing."""

from __future__ import annotations

import time
from collections.abc import Callable
from queue import SimpleQueue

from ...executor import Swapper, SwapPlan
from ...system.worker_thread import start_worker

LOOK_SECONDS = 0.0003
"""Seconds between two looks at copies on their way."""


class CopyThread:
    """An error in its thread ends the process: the device is of no use any more."""

    def __init__(self, swapper: Swapper, note: Callable[[int, int], None]) -> None:
        """`note` gets the numbers of blocks saved and loaded so far, in the thread. Nothing else
        may ask the swapper for them."""
        self._swapper = swapper
        self._note = note
        self._launched: SimpleQueue[SwapPlan] = SimpleQueue()
        start_worker("copies", self._count_all)

    def add(self, plan: SwapPlan) -> None:
        """Has the thread launch the plan's copies."""
        self._launched.put(plan)

    def _count_all(self) -> None:
        num_out = num_in = 0
        while True:
            plan = self._launched.get()
            num_out = num_out + plan.out_blocks.size
            num_in = num_in + plan.in_blocks.size
            while not self._has_ended(num_out, num_in):
                time.sleep(LOOK_SECONDS)

    def _has_ended(self, num_out: int, num_in: int) -> bool:
        """Notes how many blocks are copied. Returns whether these are at least so many."""
        num_saved = self._swapper.num_saved
        num_loaded = self._swapper.num_loaded
        self._note(num_saved, num_loaded)
        return num_saved >= num_out and num_loaded >= num_in
