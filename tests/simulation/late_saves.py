"""Host memory whose copies out are made late, as a GPU's are."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection

import numpy as np

from headwater.engine_core.config import EngineConfig
from headwater.engine_core.executor import DirectCopies, StepPlan, Swapper, SwapPlan, UInt8Array
from headwater.engine_core.executors.simulated.executor import SimulatedExecutor, SimulatedTiming
from headwater.engine_core.executors.simulated.model import SimulatedModel


class LateSaves:
    """See `Swapper`. A copy out is made when its block is written, when its slot is read, or at a
    later look."""

    direct_copies: DirectCopies | None = None

    def __init__(self, swapper: Swapper, num_looks: int) -> None:
        """`swapper` makes copies out at once. One of those that are held is made after every
        `num_looks` looks; with 0 none is held."""
        self._swapper = swapper
        self._num_looks = num_looks
        self._looks_left = num_looks
        self._held = deque[tuple[int, int]]()
        """Blocks and slots."""
        self.slots: UInt8Array = swapper.slots
        self.seconds_per_block = swapper.seconds_per_block

    def swap(self, plan: SwapPlan) -> None:
        self._held += zip(plan.out_blocks.tolist(), plan.out_slots.tolist(), strict=True)
        if not self._num_looks:
            self._make(len(self._held))
        if plan.in_blocks.size:
            self._make_for(plan.in_blocks.tolist(), plan.in_slots.tolist())
            self._swapper.swap(SwapPlan(in_blocks=plan.in_blocks, in_slots=plan.in_slots))

    @property
    def are_held(self) -> bool:
        """Whether any copies out are to be made."""
        return bool(self._held)

    def protect(self, blocks: Collection[int]) -> None:
        """Makes the copies that these blocks need before they are written."""
        self._make_for(blocks, ())

    @property
    def num_saved(self) -> int:
        self._looks_left -= 1
        if self._looks_left < 0 and self._held:
            self._looks_left = self._num_looks
            self._make(1)
        return self._swapper.num_saved

    @property
    def num_loaded(self) -> int:
        return self._swapper.num_loaded

    def _make_for(self, blocks: Collection[int], slots: Collection[int]) -> None:
        needed = [
            number
            for number, (block, slot) in enumerate(self._held, 1)
            if block in blocks or slot in slots
        ]
        self._make(max(needed, default=0))

    def _make(self, count: int) -> None:
        if not count:
            return
        pairs = [self._held.popleft() for _ in range(count)]
        blocks, slots = np.array(pairs, np.int32).reshape(-1, 2).T
        self._swapper.swap(SwapPlan(out_blocks=blocks, out_slots=slots))


class LateSavesExecutor(SimulatedExecutor):
    """Writes to no block before the copies out that it is to have are made."""

    def __init__(
        self,
        config: EngineConfig,
        model: SimulatedModel,
        timing: SimulatedTiming,
        *,
        num_looks: int,
    ) -> None:
        """`num_looks`: see `LateSaves`."""
        super().__init__(config, model, timing, verify_every=1)
        self._block_size = config.block_size
        assert self.swapper is not None
        self.swapper = self.saves = LateSaves(self.swapper, num_looks)

    def submit(self, plan: StepPlan) -> int:
        if self.saves.are_held:
            self.saves.protect(plan.written_blocks(self._block_size).tolist())
        return super().submit(plan)
