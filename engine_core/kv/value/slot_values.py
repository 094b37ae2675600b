"""Slots of a tier behind the device, in the order in which their blocks are evicted by value.

A slot that is read, or whose sequence is being saved, is in no order and stays. Knows slots and
turns; knows no copies.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .recompute import RecomputeCosts
from .return_times import ReturnClasses
from .turn import UNKNOWN, Turn, moved
from .value_order import ValueOrder


@dataclass(frozen=True, slots=True)
class GivenBack:
    """How blocks of a chain were given back that a tier may keep."""

    turn: Turn = UNKNOWN
    start: int = 0
    """Index of the first block in its chain."""
    is_move: bool = False
    """Whether a transfer, not a turn, held them."""


NO_TURN = GivenBack()


class SlotValues:
    """Values of the slots of one tier."""

    def __init__(self, num_slots: int, costs: RecomputeCosts, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._hash_of: list[bytes | None] = [None] * num_slots
        self._worthless = OrderedDict[int, None]()
        """Slots that are evicted before all others, in this order."""
        self._num_holds = [1] * num_slots
        """Reasons for which each slot is in no order: it is free, read or being saved."""
        self._index_of = [0] * num_slots
        self._tenant_of = [""] * num_slots
        self._order = ValueOrder(self._hash_of, costs, ReturnClasses(), self._retire)

    def fill(self, slot: int, block_hash: bytes, index: int) -> None:
        """Notes which block of a chain a slot holds from now on; it is being saved."""
        assert self._num_holds[slot] == 1
        self._hash_of[slot] = block_hash
        self._index_of[slot] = index
        self._order.now = self._clock()
        self._order.note_computed((block_hash,))

    def hold(self, slots: Sequence[int], *, is_move: bool) -> None:
        """Takes slots out of the order, given from the first block of a chain to the last.
        `is_move`: for no turn, as to lend their blocks."""
        self._order.now = self._clock()
        free = [slot for slot in slots if not self._num_holds[slot]]
        for slot in self._order.note_hit(free, self._num_holds, is_move=is_move):
            del self._worthless[slot]
        for slot in slots:
            self._num_holds[slot] += 1

    def let_go(self, slots: Sequence[int], given: GivenBack | None = None) -> None:
        """Makes slots evictable again, given from first to last. `given`: how the device's blocks
        were released; None: the slots were read for a transfer."""
        self._order.now = self._clock()
        free = []
        for slot in slots:
            self._num_holds[slot] -= 1
            if not self._num_holds[slot]:
                free.append(slot)
        if not free:
            return
        if given is None:
            given = GivenBack(moved(self._tenant_of[free[0]]), is_move=True)
        for slot in free:
            self._tenant_of[slot] = given.turn.tenant
        last = self._index_of[free[-1]]
        self._order.admit(free, last, given.turn, is_move=given.is_move)

    def take(self, count: int) -> list[bytes]:
        """Takes so many slots of the least values, or all that may be evicted; returns the hashes
        of their blocks."""
        self._order.now = self._clock()
        slots = list[int]()
        while self._worthless and len(slots) < count:
            slots.append(self._worthless.popitem(last=False)[0])
        if missing := min(count - len(slots), self._order.num_blocks):
            slots += self._order.take(missing)
        taken = []
        for slot in slots:
            block_hash = self._hash_of[slot]
            assert block_hash is not None
            taken.append(block_hash)
            self._hash_of[slot] = None
            self._num_holds[slot] = 1
        return taken

    def _retire(self, slots: Sequence[int]) -> None:
        for slot in reversed(slots):
            self._worthless[slot] = None
            self._worthless.move_to_end(slot, last=False)
