"""Which blocks each replica of one model caches, as a gateway sees it: block hash → bitmap over columns it numbers.

A column belongs to one incarnation; a resync fills a new column and swaps it in. Knows nothing about how events and
snapshots arrive.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from heapq import heappop, heappush

from headwater.proto import events_pb2

MAX_BLOCKS = 1_000_000
"""Entries, about 0.2 kB each with their share of the columns; the least recently used go first."""
_SWEEP_BLOCKS = 512
"""Of dead columns, taken out with each batch."""
_EXPIRE_REQUESTS = 2


class Verdict(Enum):
    """What became of a batch."""

    APPLIED = auto()
    OLD = auto()
    """It was known already, or belongs to another incarnation."""
    GAP = auto()
    """Batches before it are missing."""
    MISMATCH = auto()
    """Applied, and its count or checksum says that something else was lost."""


@dataclass(slots=True, eq=False)
class Column:
    """One incarnation's blocks."""

    number: int
    replica_id: str
    epoch: int
    seq: int = 0
    """The last batch applied."""
    blocks: set[bytes] = field(default_factory=set)
    """What the engine said that it caches."""
    xor: int = 0
    """Checksum of `blocks`, as in `KvEventBatch.index_xor`."""
    is_synced: bool = True
    """No batch is missing."""
    is_whole: bool = True
    """Nothing was evicted here, so that count and checksum can be compared."""
    expected: dict[bytes, float] = field(default_factory=dict)
    """Speculative: blocks that requests on their way will store, and until when that is believed."""

    @property
    def bit(self) -> int:
        return 1 << self.number


class KvIndex:
    """Lookups cost some fifty nanoseconds a block. All methods return at once; one thread uses them."""

    def __init__(self, max_blocks: int = MAX_BLOCKS, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_blocks = max_blocks
        self._clock = clock
        self._bitmaps: dict[bytes, int] = {}
        """What engines said; in the order of last use, as far as eviction may be near."""
        self._hopes: dict[bytes, int] = {}
        """What requests on their way will make true. Apart, because it is small and so its look-ups are quick."""
        self._columns: dict[str, Column] = {}
        self._by_number: dict[int, Column] = {}
        self._dying: deque[Column] = deque()
        self._live = 0
        self._expiries: list[tuple[float, int, Column, Sequence[bytes]]] = []
        """A heap, by the time until which something is expected."""
        self._num_expected = itertools.count()

    def __len__(self) -> int:
        return len(self._bitmaps)

    @property
    def columns(self) -> Collection[Column]:
        """Those that count, one a replica."""
        return self._columns.values()

    def column(self, replica_id: str) -> Column | None:
        """The column that counts for a replica."""
        return self._columns.get(replica_id)

    def num_blocks(self, replica_id: str) -> int:
        """That the replica said it caches."""
        column = self._columns.get(replica_id)
        return len(column.blocks) if column is not None else 0

    def is_synced(self, replica_id: str, epoch: int) -> bool:
        """The column of this incarnation counts and has everything that was said so far."""
        column = self._columns.get(replica_id)
        return column is not None and column.epoch == epoch and column.is_synced

    def open(self, replica_id: str, epoch: int) -> Column:
        """An empty column that counts nothing until it is published."""
        number = next(number for number in itertools.count() if number not in self._by_number)
        column = self._by_number[number] = Column(number, replica_id, epoch)
        return column

    def fill(self, column: Column, blocks: Iterable[bytes]) -> None:
        """More of a snapshot."""
        self._store(column, blocks)

    def publish(self, column: Column, seq: int) -> None:
        """From now on this is what the replica caches, as of batch `seq`; the column before it is dead."""
        before = self._columns.get(column.replica_id)
        if before is not None and before.epoch == column.epoch:
            self._inherit(column, before)
        self.forget(column.replica_id)
        column.seq = seq
        self._columns[column.replica_id] = column
        self._live |= column.bit

    def abandon(self, column: Column) -> None:
        """Gives up a column that was not published."""
        self._dying.append(column)

    def forget(self, replica_id: str) -> None:
        """The replica is gone; its bits are dead at once and taken out later, a few at a time."""
        column = self._columns.pop(replica_id, None)
        if column is not None:
            self._live &= ~column.bit
            for block in column.expected:
                _clear_bit(self._hopes, block, column.bit)
            column.expected.clear()
            self._dying.append(column)

    def apply(self, batch: events_pb2.KvEventBatch) -> Verdict:
        """Takes the next batch of the incarnation whose column counts."""
        self.sweep(_SWEEP_BLOCKS)
        column = self._columns.get(batch.incarnation.replica_id)
        if column is None or column.epoch != batch.incarnation.epoch or batch.seq <= column.seq:
            return Verdict.OLD
        if batch.seq != column.seq + 1:
            column.is_synced = False
            return Verdict.GAP
        column.seq = batch.seq
        if batch.cleared:
            self._drop(column, list(column.blocks))
        self._drop(column, batch.removed)
        for chain in batch.stored:
            # The head of a chain is younger than its tail, so that eviction shortens chains from their end.
            self._store(column, reversed(chain.block_hashes))
        self._evict()
        if column.is_whole and (len(column.blocks) != batch.index_count or column.xor != batch.index_xor):
            column.is_synced = False
            return Verdict.MISMATCH
        return Verdict.APPLIED

    def lookup(self, hashes: Sequence[bytes]) -> dict[str, int]:
        """For each replica that holds the start of the chain: how many of its blocks, from the first on, it holds."""
        self._expire()
        matched: dict[str, int] = {}
        fact, hope, bits, length = self._bitmaps.get, self._hopes.get, self._live, 0
        for length, block in enumerate(hashes):
            still = (fact(block, 0) | hope(block, 0)) & bits
            if still != bits:
                if length:
                    self._note(matched, bits & ~still, length)
                bits = still
                if not bits:
                    break
        else:
            length = len(hashes)
            if length:
                self._note(matched, bits, length)
        self._touch(hashes[:length])
        return matched

    def expect(self, replica_id: str, hashes: Sequence[bytes], seconds: float) -> None:
        """Believes for `seconds` that a request on its way makes the replica cache these blocks."""
        column = self._columns.get(replica_id)
        if column is None or not hashes:
            return
        until, bit, hopes = self._clock() + seconds, column.bit, self._hopes
        column.expected.update(dict.fromkeys(hashes, until))
        for block in hashes:
            hopes[block] = hopes.get(block, 0) | bit
        heappush(self._expiries, (until, next(self._num_expected), column, hashes))

    def sweep(self, num_blocks: int) -> None:
        """Takes up to so many bits of dead columns out; an empty column's number is free again."""
        while self._dying and num_blocks > 0:
            column = self._dying[0]
            some = list(itertools.islice(column.blocks, num_blocks))
            num_blocks -= len(some)
            column.blocks.difference_update(some)
            for block in some:
                _clear_bit(self._bitmaps, block, column.bit)
            if not column.blocks:
                self._dying.popleft()
                del self._by_number[column.number]

    def _store(self, column: Column, blocks: Iterable[bytes]) -> None:
        bit, known, bitmaps, xor = column.bit, column.blocks, self._bitmaps, column.xor
        for block in blocks:
            if block not in known:
                known.add(block)
                xor ^= int.from_bytes(block[:8], "little")
                bitmaps[block] = bitmaps.get(block, 0) | bit
        column.xor = xor

    def _drop(self, column: Column, blocks: Iterable[bytes]) -> None:
        bit, known = column.bit, column.blocks
        for block in blocks:
            if block in known:
                known.remove(block)
                column.xor ^= int.from_bytes(block[:8], "little")
                _clear_bit(self._bitmaps, block, bit)
            if column.expected.pop(block, None) is not None:
                _clear_bit(self._hopes, block, bit)

    def _inherit(self, column: Column, before: Column) -> None:
        """What is expected of an incarnation does not change by a resync."""
        for block in before.expected:
            self._hopes[block] |= column.bit
        column.expected.update(before.expected)
        self._expiries = [
            (until, number, column if each is before else each, hashes)
            for until, number, each, hashes in self._expiries
        ]

    def _expire(self) -> None:
        """Takes back what was expected, of a few requests at a time: each look-up brings one more at most."""
        now = self._clock()
        for _ in range(min(_EXPIRE_REQUESTS, len(self._expiries))):
            if self._expiries[0][0] > now:
                break
            _, _, column, hashes = heappop(self._expiries)
            until, bit = column.expected, column.bit
            for block in hashes:
                if until.get(block, now + 1) <= now:
                    del until[block]
                    _clear_bit(self._hopes, block, bit)

    def _note(self, matched: dict[str, int], bits: int, length: int) -> None:
        for number in _set_bits(bits):
            matched[self._by_number[number].replica_id] = length

    def _touch(self, hashes: Sequence[bytes]) -> None:
        if len(self._bitmaps) > self._max_blocks * 7 // 8:
            for block in reversed(hashes):
                if block in self._bitmaps:
                    self._bitmaps[block] = self._bitmaps.pop(block)

    def _evict(self) -> None:
        """NOTE: many at a time, since finding a dict's first entry gets slow behind entries that were deleted."""
        excess = len(self._bitmaps) - self._max_blocks
        if excess <= 0:
            return
        for block in list(itertools.islice(self._bitmaps, excess + self._max_blocks // 512)):
            for number in _set_bits(self._bitmaps.pop(block)):
                column = self._by_number[number]
                column.is_whole = False
                if block in column.blocks:
                    column.blocks.remove(block)
                    column.xor ^= int.from_bytes(block[:8], "little")


def _clear_bit(bitmaps: dict[bytes, int], block: bytes, bit: int) -> None:
    bits = bitmaps.get(block, 0) & ~bit
    if bits:
        bitmaps[block] = bits
    else:
        bitmaps.pop(block, None)


def _set_bits(bits: int) -> Iterator[int]:
    while bits:
        low = bits & -bits
        yield low.bit_length() - 1
        bits ^= low
