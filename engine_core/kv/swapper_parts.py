"""One swapper for several block sources: each has slots of its own, and counts its own copies."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from ..executor import DirectCopies, Swapper, SwapPlan, UInt8Array


class SwapperParts:
    """Divides a swapper's slots among block sources, from the first slot on."""

    def __init__(self, swapper: Swapper) -> None:
        self.swapper = swapper
        self._num_slots = 0
        # An earlier engine may have made copies with the same swapper.
        self.saves = _Shares(swapper.num_saved)
        self.loads = _Shares(swapper.num_loaded)

    def part(self, num_slots: int) -> SwapperPart:
        """The next `num_slots` slots, as a swapper."""
        first = self._num_slots
        self._num_slots = self._num_slots + num_slots
        assert self._num_slots <= len(self.swapper.slots)
        return SwapperPart(self, first, num_slots)


class SwapperPart:
    """A range of slots with the methods of `Swapper`."""

    def __init__(self, whole: SwapperParts, first: int, num_slots: int) -> None:
        self._whole = whole
        self._first = first
        self.slots: UInt8Array = whole.swapper.slots[first : first + num_slots]

    @property
    def seconds_per_block(self) -> float:
        return self._whole.swapper.seconds_per_block

    @property
    def direct_copies(self) -> DirectCopies | None:
        return self._whole.swapper.direct_copies

    def swap(self, plan: SwapPlan) -> None:
        if self._first:
            out_slots = plan.out_slots + self._first
            in_slots = plan.in_slots + self._first
            plan = replace(plan, out_slots=out_slots, in_slots=in_slots)
        self._whole.saves.add(self, plan.out_blocks.size)
        self._whole.loads.add(self, plan.in_blocks.size)
        self._whole.swapper.swap(plan)

    @property
    def num_saved(self) -> int:
        return self._whole.saves.num_done(self, self._whole.swapper.num_saved)

    @property
    def num_loaded(self) -> int:
        return self._whole.loads.num_done(self, self._whole.swapper.num_loaded)


class _Shares:
    """Owners of the copies of one direction; copies end in the order of their plans."""

    def __init__(self, num_counted: int) -> None:
        """`num_counted`: copies so far, of no part."""
        self._queue: deque[tuple[SwapperPart, int]] = deque()
        self._done: dict[SwapperPart, int] = {}
        self._num_counted = num_counted

    def add(self, part: SwapperPart, count: int) -> None:
        if count and self._queue and self._queue[-1][0] is part:
            count += self._queue.pop()[1]
        if count:
            self._queue.append((part, count))

    def num_done(self, part: SwapperPart, total: int) -> int:
        """Number of finished copies of one part, when `total` copies of all parts are finished."""
        left = total - self._num_counted
        while left and self._queue:
            owner, count = self._queue.popleft()
            done = min(count, left)
            self._done[owner] = self._done.get(owner, 0) + done
            self._num_counted += done
            left -= done
            if done < count:
                self._queue.appendleft((owner, count - done))
        return self._done.get(part, 0)
