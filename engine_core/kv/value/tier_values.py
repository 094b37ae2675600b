"""Blocks of a tier behind the device in the order in which they are evicted by value."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence

from .recompute import RecomputeCosts
from .return_times import ReturnClasses
from .tier_order import GivenBack, end_holds
from .turn import moved
from .value_order import ValueOrder


class TierValues:
    """See `TierOrder`. The block of the least value goes first, of a chain the last one."""

    def __init__(self, num_blocks: int, costs: RecomputeCosts, clock: Callable[[], float]) -> None:
        """`num_blocks`: most blocks that the tier has."""
        self._clock = clock
        self._number_of: dict[bytes, int] = {}
        """Number, below `num_blocks`, by which the order knows a block."""
        self._free = list(reversed(range(num_blocks)))
        """Numbers of no block."""
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._index_of = [0] * num_blocks
        self._tenant_of = [""] * num_blocks
        self._num_holds = Counter[bytes]()
        self._no_holds = bytes(num_blocks)
        """References of the blocks that the order has: what is held is not in it."""
        self._worthless = OrderedDict[int, None]()
        """Blocks that are evicted before all others, in this order."""
        self._order = ValueOrder(self._hash_of, costs, ReturnClasses(), self._retire)

    def fill(self, hashes: Sequence[bytes], indexes: Iterable[int]) -> None:
        for block_hash, index in zip(hashes, indexes, strict=False):
            self._add(block_hash, index)
        self._num_holds.update(hashes)
        self._order.now = self._clock()
        self._order.note_computed(hashes)

    def add_oldest(self, block_hash: bytes, parent: bytes) -> None:
        before = self._number_of.get(parent)
        number = self._add(block_hash, 0 if before is None else self._index_of[before] + 1)
        self._retire((number,))

    def hold(self, hashes: Sequence[bytes], *, is_move: bool) -> None:
        self._order.now = self._clock()
        holds = self._num_holds
        number_of = self._number_of
        self._withdraw(
            [number_of[each] for each in hashes if each in number_of and each not in holds],
            is_move=is_move,
        )
        holds.update(hashes)

    def let_go(self, hashes: Sequence[bytes], given: GivenBack | None = None) -> None:
        self._order.now = self._clock()
        number_of = self._number_of
        unheld = end_holds(self._num_holds, hashes)
        numbers = [number_of[each] for each in unheld if each in number_of]
        if not numbers:
            return
        if given is None:
            given = GivenBack(moved(self._tenant_of[numbers[0]]), is_move=True)
        for number in numbers:
            self._tenant_of[number] = given.turn.tenant
        last = self._index_of[numbers[-1]]
        self._order.admit(numbers, last, given.turn, is_move=given.is_move)

    def touch(self, hashes: Sequence[bytes]) -> None:
        """Does nothing: the turn that loaded blocks counts when it gives them back."""

    def take(self, count: int) -> list[bytes]:
        self._order.now = self._clock()
        numbers = list[int]()
        while self._worthless and len(numbers) < count:
            numbers.append(self._worthless.popitem(last=False)[0])
        if missing := min(count - len(numbers), self._order.num_blocks):
            numbers += self._order.take(missing)
        return [self._remove(number) for number in numbers]

    def drop(self, hashes: Iterable[bytes]) -> None:
        self._order.now = self._clock()
        for block_hash in hashes:
            if (number := self._number_of.get(block_hash)) is not None:
                if block_hash not in self._num_holds:
                    self._withdraw([number], is_move=True)
                self._order.forget((number,))
                self._remove(number)

    def _add(self, block_hash: bytes, index: int) -> int:
        number = self._number_of[block_hash] = self._free.pop()
        self._hash_of[number] = block_hash
        self._index_of[number] = index
        self._tenant_of[number] = ""
        return number

    def _remove(self, number: int) -> bytes:
        """Forgets a block that is in no order; returns its hash."""
        block_hash = self._hash_of[number]
        assert block_hash is not None
        del self._number_of[block_hash]
        self._hash_of[number] = None
        self._free.append(number)
        return block_hash

    def _withdraw(self, numbers: list[int], *, is_move: bool) -> None:
        """Takes blocks out of the order."""
        for number in self._order.note_hit(numbers, self._no_holds, is_move=is_move):
            del self._worthless[number]

    def _retire(self, numbers: Sequence[int]) -> None:
        """Puts blocks before all others, the first of them first."""
        for number in reversed(numbers):
            self._worthless[number] = None
            self._worthless.move_to_end(number, last=False)
