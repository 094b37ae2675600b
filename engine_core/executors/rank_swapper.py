"""The host memory of an engine of several ranks, each of which copies its own part of a block."""

from __future__ import annotations

from ..executor import SwapPlan, UInt8Array
from ..parallel.plan_messages import encode_swap
from ..parallel.ranks import Ranks


class RankSwapper:
    """See `Swapper`. `swap` may raise `RankLost`."""

    direct_copies = None
    seconds_per_block = 0.0
    """As in `MemorySwapper`: a copy takes far less time than a block takes to compute."""

    def __init__(self, ranks: Ranks, slots: UInt8Array) -> None:
        self._ranks, self.slots = ranks, slots

    def swap(self, plan: SwapPlan) -> None:
        self._ranks.tell(encode_swap(plan))

    @property
    def num_saved(self) -> int:
        return self._ranks.board.num_saved

    @property
    def num_loaded(self) -> int:
        return self._ranks.board.num_loaded
