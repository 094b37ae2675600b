"""Host memory of an engine with several ranks, each of which copies its own part of a block."""

from __future__ import annotations

import time

import numpy as np

from ...executor import Int32Array, SwapPlan, UInt8Array
from ...parallel.plan_messages import encode_swap
from ...parallel.ranks import Ranks

LOOK_SECONDS = 2e-4
"""Seconds between two looks at what ranks have copied. They are rarely behind."""


class RankSwapper:
    """See `Swapper`. `swap` may raise `RankLost`."""

    direct_copies = None
    """Engines copy out of one process's KV cache; blocks of ranks go as records."""

    def __init__(
        self, ranks: Ranks, slots: UInt8Array, seconds_per_block: float, *, has_copies: bool
    ) -> None:
        """`seconds_per_block`: that of the slowest rank. `has_copies`: several ranks have the same
        bytes of a block, and write them to the same place."""
        self._ranks = ranks
        self._has_copies = has_copies
        self._filled_by = np.zeros(len(slots), np.int64)
        """[num_slots] saves up to the one that fills a slot."""
        self._num_asked = 0
        self.slots = slots
        self.seconds_per_block = seconds_per_block

    def swap(self, plan: SwapPlan) -> None:
        if self._has_copies:
            self._await_saves(plan.out_slots)
        self._ranks.send(encode_swap(plan))

    @property
    def num_saved(self) -> int:
        return self._ranks.board.num_saved

    @property
    def num_loaded(self) -> int:
        return self._ranks.board.num_loaded

    def _await_saves(self, slots: Int32Array) -> None:
        """Returns when all ranks have filled these slots as plans before this one asked for. A rank
        that is late would write an older block over what others have saved, and load."""
        number = int(self._filled_by[slots].max(initial=0))
        while self.num_saved < number:
            self._ranks.take_reports()
            time.sleep(LOOK_SECONDS)
        self._num_asked += slots.size
        self._filled_by[slots] = self._num_asked
