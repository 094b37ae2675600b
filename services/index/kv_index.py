"""The blocks that each replica of one model caches, as a gateway sees them: block hash → bitmap
over columns that it numbers.

A column belongs to one incarnation; a resync fills a new column and swaps it in. Knows nothing
about how events and snapshots arrive.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, KeysView, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from heapq import heapify, heappop, heappush

from headwater.proto import events_pb2

from .continuation import ALL_BLOCKS, last_continued, name_of

MAX_BLOCKS = 1_000_000
"""Largest number of entries, about 0.2 kB each with their share of the columns; the least recently
used are evicted first."""
_SWEEP_BLOCKS = 512
"""Number of blocks of dead columns that are removed with each batch."""
_EXPIRE_REQUESTS = 2


class Verdict(Enum):
    """Result of applying a batch."""

    APPLIED = auto()
    OLD = auto()
    """The batch was known already, or belongs to another incarnation."""
    GAP = auto()
    """Batches before it are missing."""
    MISMATCH = auto()
    """The batch was applied; its count or checksum shows that other events were lost."""


@dataclass(slots=True, eq=False)
class Column:
    """One incarnation's blocks."""

    number: int
    replica_id: str
    epoch: int
    seq: int = 0
    """Number of the last batch applied."""
    stored: dict[bytes, None] = field(default_factory=dict)
    """Blocks that the engine reported as cached. NOTE: a dict, as the garbage collector goes
    through sets: a million blocks took it 0.1 s each time (2026-11-21)."""
    xor: int = 0
    """Checksum of `blocks`, as in `KvEventBatch.index_xor`."""
    is_synced: bool = True
    """Whether no batch is missing."""
    is_whole: bool = True
    """Whether no block was evicted here, so that count and checksum can be compared."""
    blocks_seen: tuple[int, ...] = ()
    """See `ServedModel.blocks_seen`."""

    @property
    def blocks(self) -> KeysView[bytes]:
        return self.stored.keys()

    @property
    def bit(self) -> int:
        return 1 << self.number


@dataclass(slots=True, eq=False)
class _Expectation:
    """Blocks that a request on its way is expected to store."""

    column: Column
    chain: Sequence[bytes]
    """Block hashes of the request's prompt."""
    start: int
    """Place in the chain from which on the blocks are new."""

    def reach(self, chain: Sequence[bytes], start: int) -> int:
        """Number of blocks of a chain that are covered, given that the chain goes through the first
        expected block at `start`.

        NOTE: a block's hash covers all blocks before it, so the place where two chains part is
        found by bisection.
        """
        low = 1
        high = min(len(self.chain) - self.start, len(chain) - start)
        while low < high:
            middle = (low + high + 1) // 2
            if self.chain[self.start + middle - 1] == chain[start + middle - 1]:
                low = middle
            else:
                high = middle - 1
        return start + low


class KvIndex:
    """Index of one model. Lookups cost some fifty nanoseconds a block. All methods return at once;
    one thread uses them."""

    def __init__(
        self, max_blocks: int = MAX_BLOCKS, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._max_blocks = max_blocks
        self._clock = clock
        self._bitmaps: dict[bytes, int] = {}
        """Bitmaps of reported blocks, in the order of last use as far as eviction may be near."""
        self._expectations: dict[bytes, list[_Expectation]] = {}
        """Expected blocks of requests on their way, by the first new block of each."""
        self._columns: dict[str, Column] = {}
        self._by_number: dict[int, Column] = {}
        self._retired: deque[Column] = deque()
        self._live = 0
        self._expiries: list[tuple[float, int, _Expectation]] = []
        """Heap of expectations by their expiry."""
        self._num_expected = itertools.count()

    def __len__(self) -> int:
        return len(self._bitmaps)

    @property
    def columns(self) -> Collection[Column]:
        """Columns that count, one a replica."""
        return self._columns.values()

    def column(self, replica_id: str) -> Column | None:
        """The column that counts for a replica."""
        return self._columns.get(replica_id)

    def is_synced(self, replica_id: str, epoch: int) -> bool:
        """Whether the column of this incarnation counts and has all batches so far."""
        column = self._columns.get(replica_id)
        return column is not None and column.epoch == epoch and column.is_synced

    def open(self, replica_id: str, epoch: int, blocks_seen: tuple[int, ...] = ()) -> Column:
        """Opens an empty column that does not count until it is published. `blocks_seen`: see
        `ServedModel`."""
        number = next(number for number in itertools.count() if number not in self._by_number)
        column = Column(number, replica_id, epoch, blocks_seen=blocks_seen)
        self._by_number[number] = column
        return column

    def fill(self, column: Column, blocks: Iterable[bytes]) -> None:
        """Adds a part of a snapshot."""
        self._store(column, blocks)

    def publish(self, column: Column, seq: int) -> None:
        """Makes the column count as the replica's cache as of batch `seq`; the column before it is
        dead."""
        before = self._columns.get(column.replica_id)
        if before is not None and before.epoch == column.epoch:
            self._inherit(column, before)
        self.forget(column.replica_id)
        column.seq = seq
        self._columns[column.replica_id] = column
        self._live |= column.bit

    def abandon(self, column: Column) -> None:
        """Gives up a column that was not published."""
        self._retire(column)

    def forget(self, replica_id: str) -> None:
        """Removes a replica that is gone; its bits are dead at once and removed later, a few at a
        time."""
        column = self._columns.pop(replica_id, None)
        if column is not None:
            self._live &= ~column.bit
            self._retire(column)

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
            self._drop(column, list(column.stored))
            self._drop_expected(column)
        self._drop(column, batch.removed)
        for chain in batch.stored:
            # The head of a chain is younger than its tail, so that eviction shortens chains from
            # their end.
            self._store(column, reversed(chain.block_hashes))
        self._evict()
        if column.is_whole and (
            len(column.stored) != batch.index_count or column.xor != batch.index_xor
        ):
            column.is_synced = False
            return Verdict.MISMATCH
        return Verdict.APPLIED

    def lookup(self, hashes: Sequence[bytes]) -> dict[str, int]:
        """Number of the chain's blocks, from the first on, behind which each replica can continue
        it; replicas that can continue it nowhere are left out."""
        self._expire()
        matched: dict[str, int] = {}
        known = self._bitmaps.get
        bits = self._live
        length = 0
        for length, block in enumerate(hashes):
            still = known(block, 0) & bits
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
        for column in self._columns.values():
            if column.blocks_seen:
                self._note_continued(matched, column, hashes)
        if self._expectations:
            self._add_expected(hashes, matched)
        self._touch(hashes[:length])
        return matched

    def expect(
        self, replica_id: str, hashes: Sequence[bytes], seconds: float, start: int = 0
    ) -> None:
        """Assumes for `seconds` that a request on its way makes the replica cache this chain from
        `start` on."""
        # Reads of Redis may add more expectations than there are look-ups.
        self._expire()
        column = self._columns.get(replica_id)
        if column is None or start >= len(hashes):
            return
        expected = _Expectation(column, hashes, start)
        self._expectations.setdefault(hashes[start], []).append(expected)
        heappush(self._expiries, (self._clock() + seconds, next(self._num_expected), expected))

    def sweep(self, num_blocks: int) -> None:
        """Removes up to `num_blocks` bits of dead columns; the number of an empty column is free
        again."""
        while self._retired and num_blocks > 0:
            column = self._retired[0]
            for _ in range(min(num_blocks, len(column.stored))):
                block, _ = column.stored.popitem()
                _clear_bit(self._bitmaps, block, column.bit)
                num_blocks -= 1
            if not column.stored:
                self._retired.popleft()
                del self._by_number[column.number]

    def _retire(self, column: Column) -> None:
        """Marks a column as dead. Where no replica is left whose batches would sweep, all its bits
        are removed at once."""
        self._retired.append(column)
        if len(self._retired) == len(self._by_number):
            self._bitmaps = {}
            self._by_number = {}
            self._retired.clear()

    def _store(self, column: Column, blocks: Iterable[bytes]) -> None:
        bit = column.bit
        known = column.stored
        bitmaps = self._bitmaps
        xor = column.xor
        for block in blocks:
            if block not in known:
                known[block] = None
                xor ^= int.from_bytes(block[:8], "little")
                bitmaps[block] = bitmaps.get(block, 0) | bit
        column.xor = xor

    def _drop(self, column: Column, blocks: Iterable[bytes]) -> None:
        bit = column.bit
        known = column.stored
        for block in blocks:
            if block in known:
                del known[block]
                column.xor ^= int.from_bytes(block[:8], "little")
                _clear_bit(self._bitmaps, block, bit)

    def _add_expected(self, chain: Sequence[bytes], matched: dict[str, int]) -> None:
        """Extends the held blocks of replicas by the expected blocks after them."""
        known = self._bitmaps.get
        at = 0
        reach = max(matched.values(), default=0)
        while at <= reach and at < len(chain):
            for expected in self._expectations.get(chain[at], ()):
                column = expected.column
                held = matched.get(column.replica_id, 0)
                if self._columns.get(column.replica_id) is column and held >= at:
                    if column.blocks_seen and expected.chain[-1] in column.stored:
                        # The expected blocks are cached: marks tell where they can be continued.
                        continue
                    end = max(held, expected.reach(chain, at))
                    while not column.blocks_seen and (
                        end < len(chain) and known(chain[end], 0) & column.bit
                    ):
                        end += 1
                    matched[column.replica_id] = end
                    reach = max(reach, end)
            at += 1

    def _inherit(self, column: Column, before: Column) -> None:
        """Moves the expectations of an incarnation to its new column: a resync does not change
        them."""
        for _, _, expected in self._expiries:
            if expected.column is before:
                expected.column = column

    def _drop_expected(self, column: Column) -> None:
        """Drops the expectations of a replica whose cache is empty: the expected blocks are no
        longer part of any prefix."""
        over = [entry for entry in self._expiries if entry[2].column is column]
        for _, _, expected in over:
            self._forget_expectation(expected)
        if over:
            self._expiries = [entry for entry in self._expiries if entry[2].column is not column]
            heapify(self._expiries)

    def _expire(self) -> None:
        """Removes expired expectations, of a few requests at a time: more than come at the same
        time."""
        now = self._clock()
        for _ in range(min(_EXPIRE_REQUESTS, len(self._expiries))):
            if self._expiries[0][0] > now:
                break
            self._forget_expectation(heappop(self._expiries)[2])

    def _forget_expectation(self, expected: _Expectation) -> None:
        block = expected.chain[expected.start]
        self._expectations[block].remove(expected)
        if not self._expectations[block]:
            del self._expectations[block]

    def _note(self, matched: dict[str, int], bits: int, length: int) -> None:
        for number in _set_bits(bits):
            matched[self._by_number[number].replica_id] = length

    def _note_continued(
        self, matched: dict[str, int], column: Column, hashes: Sequence[bytes]
    ) -> None:
        """Notes how far a replica with several kinds of pages can continue a chain, of which it
        holds the blocks that `matched` says."""
        has_first = column.blocks_seen[0] == ALL_BLOCKS
        end = matched.pop(column.replica_id, 0) if has_first else len(hashes)
        matched.pop(column.replica_id, None)

        def has(kind: int, idx: int) -> bool:
            return name_of(kind, hashes[idx]) in column.stored

        if end := last_continued(column.blocks_seen, has, 0, end):
            matched[column.replica_id] = end

    def _touch(self, hashes: Sequence[bytes]) -> None:
        if len(self._bitmaps) > self._max_blocks * 7 // 8:
            for block in reversed(hashes):
                if block in self._bitmaps:
                    self._bitmaps[block] = self._bitmaps.pop(block)

    def _evict(self) -> None:
        """Evicts the oldest blocks. NOTE: many at a time, since finding a dict's first entry gets
        slow behind entries that were deleted."""
        excess = len(self._bitmaps) - self._max_blocks
        if excess <= 0:
            return
        for block in list(itertools.islice(self._bitmaps, excess + self._max_blocks // 512)):
            for number in _set_bits(self._bitmaps.pop(block)):
                column = self._by_number[number]
                column.is_whole = False
                if block in column.stored:
                    del column.stored[block]
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
