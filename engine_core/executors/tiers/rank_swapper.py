"""The host memory of an engine of several ranks, each of which copies its own part of a block."""

from __future__ import annotations

from ...executor import SwapPlan, UInt8Array
from ...parallel.plan_messages import encode_swap
from ...parallel.ranks import Ranks


class RankSwapper:
    """See `Swapper`. `swap` may raise `RankLost`."""

    direct_copies = None
    """Engines copy out of one process's KV cache; blocks of ranks go as records."""

    def __init__(self, ranks: Ranks, slots: UInt8Array, seconds_per_block: float) -> None:
        """`seconds_per_block`: that of the slowest rank."""
        self._ranks = ranks
        self.slots = slots
        self.seconds_per_block = seconds_per_block

    def swap(self, plan: SwapPlan) -> None:
        self._ranks.send(encode_swap(plan))

    @property
    def num_saved(self) -> int:
        return self._ranks.board.num_saved

    @property
    def num_loaded(self) -> int:
        return self._ranks.board.num_loaded
