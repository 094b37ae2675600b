"""Host memory of the simulated executor: loaded blocks arrive late, and not before they are
reported."""

from __future__ import annotations

from collections import deque

import numpy as np
import numpy.typing as npt

from ...executor import DirectCopies, SwapPlan, UInt8Array

UInt64Array = npt.NDArray[np.uint64]


class SimulatedSwapper:
    """See `Swapper`. Copies blocks of a KV cache [num_blocks, block_size]."""

    def __init__(
        self,
        kv_blocks: UInt64Array,
        num_slots: int,
        *,
        late_polls: int,
        direct_copies: DirectCopies | None = None,
    ) -> None:
        """A block that was asked for comes at the `late_polls` + 1st look."""
        self._kv_blocks = kv_blocks
        self._late_polls = late_polls
        self.direct_copies = direct_copies
        self._slots: UInt64Array = np.zeros((num_slots, kv_blocks.shape[1]), np.uint64)
        self._coming: deque[tuple[int, UInt64Array]] = deque()
        self._num_loaded = self._num_polls = 0
        self.num_saved = 0
        self.slots: UInt8Array = self._slots.view(np.uint8)
        self.seconds_per_block = 0.0
        """Blocks come after a number of looks, not after a time."""

    def swap(self, plan: SwapPlan) -> None:
        self._slots[plan.out_slots] = self._kv_blocks[plan.out_blocks]
        self.num_saved += plan.out_blocks.size
        if plan.in_blocks.size:
            self._coming += zip(plan.in_blocks.tolist(), self._slots[plan.in_slots], strict=True)

    @property
    def num_loaded(self) -> int:
        if self._coming:
            self._num_polls += 1
        if self._num_polls > self._late_polls:
            self._num_polls = 0
            block, entries = self._coming.popleft()
            self._kv_blocks[block] = entries
            self._num_loaded += 1
        return self._num_loaded
