"""The pool of KV blocks: who holds them, which are free, which hash each caches.

Knows nothing about requests or tokens. Block 0 is the *null block*: it is never handed out, so
executors may let padding write there, and its links are the two ends of the free list. A freed
block keeps its hash until it is taken for something else; the list is ordered by worth: blocks
without a hash first, then those that were released early, then the least recently used.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from operator import eq, gt

from ..page_groups import is_block_hash
from .value.recompute import RecomputeCosts
from .value.return_times import ReturnClasses
from .value.turn import UNKNOWN, Turn
from .value.value_order import ValueOrder

NULL_BLOCK = 0
ROOM = 16
"""No eviction of valuable blocks is expected soon if one in `ROOM` free blocks caches nothing."""
WORTHY = 0.6
"""Least eviction cost of a block for which a prompt waits rather than evict it."""
CachedBlock = tuple[int, bytes, int]
"""A block, the hash that it caches, and its generation."""


class BlockPool:
    """Blocks 1 … num_blocks - 1, with reference counts, an intrusive free list and a map from hash
    to block."""

    def __init__(
        self,
        num_blocks: int,
        costs: RecomputeCosts | None = None,
        times: ReturnClasses | None = None,
    ) -> None:
        """`costs`: free blocks are evicted by value, computed from these costs; None: least
        recently used first. `times`: known return times; None: they are learnt."""
        assert num_blocks > 1
        self.num_usable = self.num_free = num_blocks - 1
        self.ref_counts = [0] * num_blocks
        self.generations: list[int] | memoryview[int] = [0] * num_blocks
        """How often each block was handed out: what it contained in an earlier generation is
        gone."""
        self._cached: list[CachedBlock] | None = None
        """Blocks that were cached since the last `take_cached`; None: the engine does not publish
        its blocks."""
        self.num_shared = 0
        """Blocks held more than once."""
        self.elsewhere: Collection[bytes] = ()
        """Hashes that block sources of this engine have: cached as long as either has them."""
        # A ring through the free blocks; NULL_BLOCK's links are its two ends. Lists, because single
        # elements are read several times faster than from numpy arrays.
        self._next = [*range(1, num_blocks + 1), NULL_BLOCK]
        self._prev = [num_blocks, *range(num_blocks)]
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self._evicted: list[bytes] = []
        self._changed: list[bytes] = []
        """Keys that are no block hashes and may be cached now, or no longer."""
        self._partial = PartialKeys()
        self.values: ValueOrder | None = None
        """Order of free blocks by value, which are not in the free list then."""
        if costs is not None:
            self.values = ValueOrder(
                self._hash_of, costs, times or ReturnClasses(), self._link_early
            )

    @property
    def _border(self) -> int:
        """Index of a sentinel in the free list, after the blocks without a hash."""
        return len(self.ref_counts)

    @property
    def num_used(self) -> int:
        return self.num_usable - self.num_free

    @property
    def eviction_cost(self) -> float:
        """See `EngineLoad.eviction_cost`; 0 as long as one of `ROOM` free blocks caches nothing."""
        values = self.values
        if values is None or (self.num_free - values.num_blocks) * ROOM > self.num_free:
            return 0.0
        return values.eviction_cost

    def eviction_loss(self, tenant: str, count: int) -> float:
        """Expected number of blocks to compute again, in units of the first block of a chain, if
        this tenant is given `count` blocks; 0 where it has less than its share."""
        values = self.values
        if values is None or not values.has_share(tenant):
            return 0.0
        num_evicted = count - (self.num_free - values.num_blocks)
        if num_evicted <= 0 or (cost := values.eviction_cost) < WORTHY:
            return 0.0
        return num_evicted * cost

    def note_time(self, now: float) -> None:
        """Notes the time of what happens next, for the values of blocks."""
        if self.values is not None:
            self.values.now = now

    def allocate(self, count: int) -> list[int]:
        """Allocates the `count` least valuable free blocks, with one reference each; what they
        cached is evicted."""
        assert count <= self.num_free
        if not count:
            return []
        values = self.values
        num_listed = self.num_free if values is None else self.num_free - values.num_blocks
        blocks = self._take_listed(min(count, num_listed))
        if values is not None:
            if blocks:
                values.forget(blocks)
            if count > num_listed:
                blocks += values.take(count - num_listed)
        ref_counts = self.ref_counts
        hash_of = self._hash_of
        block_of = self._block_of
        generations = self.generations
        for block in blocks:
            ref_counts[block] = 1
            generations[block] += 1
            if (block_hash := hash_of[block]) is not None:
                hash_of[block] = None
                del block_of[block_hash]
                if block_hash not in self.elsewhere:
                    self.note_gone(block_hash)
            if self._partial.by_block:
                self._partial.forget(block)
        self.num_free -= count
        return blocks

    def _take_listed(self, count: int) -> list[int]:
        """Takes the first blocks of the free list."""
        following = self._next
        border = self._border
        blocks = []
        block = NULL_BLOCK
        for _ in range(count):
            block = following[block]
            if block == border:
                # The border is no block: it becomes the first of the list.
                self._link(NULL_BLOCK, border)
                block = following[border]
            blocks.append(block)
        if blocks:
            before = border if following[NULL_BLOCK] == border else NULL_BLOCK
            self._link(before, following[block])
        return blocks

    def share(self, blocks: Sequence[int], *, is_move: bool = False) -> None:
        """Adds a reference to each block, free ones included, in order of their chain. `is_move`:
        the reference is for a transfer rather than a turn, so it says nothing about the next
        turn."""
        values = self.values
        ref_counts = self.ref_counts
        if values is not None:
            for block in values.note_hit(blocks, ref_counts, is_move=is_move):
                self._link(self._prev[block], self._next[block])
        for block in blocks:
            if ref_counts[block] == 0:
                if values is None:
                    self._link(self._prev[block], self._next[block])
                self.num_free -= 1
            elif ref_counts[block] == 1:
                self.num_shared += 1
            ref_counts[block] += 1

    def release(
        self,
        blocks: Sequence[int],
        *,
        is_early: bool = False,
        turn: Turn = UNKNOWN,
        start: int = 0,
        is_move: bool = False,
    ) -> None:
        """Drops a reference to a sequence's blocks, given from first to last; of unreferenced
        blocks the last is evicted first. `is_early`: evicted before all other blocks with a hash.
        `turn`: the turn that used them, and `start` the index of the first in its chain, for
        eviction by value. `is_move`: a transfer held them."""
        if self.values is not None and not is_early:
            self._release_by_value(self.values, blocks, turn, start, is_move=is_move)
            return
        ref_counts = self.ref_counts
        hash_of = self._hash_of
        following = self._next
        preceding = self._prev
        for block in reversed(blocks):
            num_holds = ref_counts[block] - 1
            assert num_holds >= 0, f"block {block} freed twice"
            ref_counts[block] = num_holds
            if num_holds == 1:
                self.num_shared -= 1
            elif num_holds == 0:
                self.num_free += 1
                is_worthless = hash_of[block] is None and block not in self._partial.by_block
                before = preceding[NULL_BLOCK]
                if is_worthless or is_early:
                    before = NULL_BLOCK if is_worthless else self._border
                after = following[before]
                following[before] = preceding[after] = block
                preceding[block] = before
                following[block] = after

    def _release_by_value(
        self, values: ValueOrder, blocks: Sequence[int], turn: Turn, start: int, *, is_move: bool
    ) -> None:
        """Like `release`. Blocks that cache nothing are the first in the free list."""
        ref_counts = self.ref_counts
        hash_of = self._hash_of
        partial = self._partial.by_block
        valued = []
        for block in blocks:
            num_holds = ref_counts[block] - 1
            assert num_holds >= 0, f"block {block} freed twice"
            ref_counts[block] = num_holds
            if num_holds == 1:
                self.num_shared -= 1
            elif num_holds == 0:
                self.num_free += 1
                if hash_of[block] is not None or block in partial:
                    valued.append(block)
                else:
                    behind = self._next[NULL_BLOCK]
                    self._link(NULL_BLOCK, block)
                    self._link(block, behind)
        if valued:
            last = start + blocks.index(valued[-1])
            values.admit(valued, last, turn, is_move=is_move)

    def are_unheld(self, blocks: Sequence[int], hashes: Sequence[bytes]) -> list[bool]:
        """Whether each block still caches its hash while no request holds it."""
        caches_it = map(eq, map(self._hash_of.__getitem__, blocks), hashes)
        # `True` counts as 1: more than 0 holds, and not more than any other number.
        return list(map(gt, caches_it, map(self.ref_counts.__getitem__, blocks)))

    def count_unheld(self, blocks: Sequence[int]) -> int:
        """How many of these blocks sharing would take out of the free list."""
        return sum(self.ref_counts[block] == 0 for block in blocks)

    def count_returning(self, blocks: Iterable[int]) -> int:
        """How many blocks come free once each of these holds, one a block, is released."""
        holds = Counter(blocks)
        return sum(self.ref_counts[block] == num_held for block, num_held in holds.items())

    def cache(self, block: int, block_hash: bytes) -> bool:
        """Registers a held block under its hash, unless another block already is. Returns whether
        the hash was cached nowhere."""
        return self.cache_each((block,), (block_hash,))[0]

    def cache_each(self, blocks: Sequence[int], hashes: Sequence[bytes]) -> list[bool]:
        """`cache` of each of these blocks in turn."""
        if self.values is not None:
            self.values.note_computed(hashes)
        ref_counts = self.ref_counts
        hash_of = self._hash_of
        block_of = self._block_of
        cached = self._cached
        are_new = []
        for block, block_hash in zip(blocks, hashes, strict=True):
            assert ref_counts[block] > 0
            assert hash_of[block] is None, f"block {block} is cached already"
            if block_hash in block_of:
                are_new.append(False)
                continue
            block_of[block_hash] = block
            hash_of[block] = block_hash
            if cached is not None:
                cached.append((block, block_hash, self.generations[block]))
            are_new.append(block_hash not in self.elsewhere)
        return are_new

    def cache_page(self, block: int, key: bytes) -> None:
        """Like `cache`, under the key of a page, which is no block hash."""
        self.cache(block, key)
        self._changed.append(key)

    def uncache(self, block: int) -> None:
        """Forgets the key of a block, if it has one. The key is not a block hash, so no event is
        published."""
        if (key := self._hash_of[block]) is not None:
            assert not is_block_hash(key)
            self._hash_of[block] = None
            del self._block_of[key]
            self._changed.append(key)

    def find(self, block_hash: bytes) -> int | None:
        return self._block_of.get(block_hash)

    def find_leading(self, hashes: Sequence[bytes]) -> list[int]:
        """Blocks of the leading hashes that are cached."""
        blocks = []
        find = self._block_of.get
        for block_hash in hashes:
            if (block := find(block_hash)) is None:
                break
            blocks.append(block)
        return blocks

    def note_partial(self, block: int, key: bytes) -> None:
        """Registers a held block under the tokens of its first positions, until it is reused. Its
        later positions are not read."""
        assert self.ref_counts[block] > 0
        self._partial.note(block, key)

    def find_partial(self, key: bytes) -> int | None:
        return self._partial.find(key)

    def publish(self, generations: memoryview[int]) -> None:
        """Counts generations in this memory from now on, which others may read; `take_cached` has
        answers then."""
        for block, generation in enumerate(self.generations):
            generations[block] = generation
        self.generations = generations
        self._cached = [
            (block, block_hash, generations[block]) for block_hash, block in self._block_of.items()
        ]

    def take_cached(self) -> list[CachedBlock]:
        """Blocks that were cached since the last call; what was handed out again is of an older
        generation."""
        if not self._cached:
            return []
        cached = self._cached
        self._cached = []
        return cached

    def hash_of(self, block: int) -> bytes | None:
        """Hash by which a block can be found."""
        return self._hash_of[block]

    def cached_hashes(self) -> list[bytes]:
        hashes = filter(is_block_hash, self._block_of)
        elsewhere = filter(is_block_hash, self.elsewhere)
        return [
            *hashes,
            *(block_hash for block_hash in elsewhere if block_hash not in self._block_of),
        ]

    def has(self, block_hash: bytes) -> bool:
        """Whether the device or a block source has a hash."""
        return block_hash in self._block_of or block_hash in self.elsewhere

    def has_all(self, keys: Sequence[bytes]) -> bool:
        """Whether the device has all of these keys, or block sources do."""
        return all(map(self._block_of.__contains__, keys)) or all(
            map(self.elsewhere.__contains__, keys)
        )

    def lacking(self, hashes: Sequence[bytes]) -> list[bytes]:
        """Hashes that neither the device nor a block source has."""
        block_of = self._block_of
        elsewhere = self.elsewhere
        return [each for each in hashes if each not in block_of and each not in elsewhere]

    def note_gone(self, block_hash: bytes) -> None:
        """Notes that a hash, or a page's key, is cached nowhere any more."""
        if is_block_hash(block_hash):
            self._evicted.append(block_hash)
        else:
            self._changed.append(block_hash)

    def note_gained(self, key: bytes) -> None:
        """Notes that a block source is about to hold a page whose key is no block hash."""
        self._changed.append(key)

    def take_evicted(self) -> list[bytes]:
        """Hashes that were lost since the last call, in order."""
        evicted = self._evicted
        self._evicted = []
        return evicted

    def take_changed(self) -> list[bytes]:
        """Keys that are no block hashes and that were cached or lost since the last call."""
        changed = self._changed
        self._changed = []
        return changed

    def _link_early(self, blocks: Sequence[int]) -> None:
        """Puts free blocks before all others with a hash, the first of them first."""
        before = self._border
        behind = self._next[before]
        for block in blocks:
            self._link(before, block)
            before = block
        self._link(before, behind)

    def _link(self, block: int, after: int) -> None:
        self._next[block] = after
        self._prev[after] = block


class PartialKeys:
    """Keys of partially filled blocks whose first positions hold known tokens."""

    def __init__(self) -> None:
        self.by_block: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}

    def note(self, block: int, key: bytes) -> None:
        """Lets a block be found by this key alone."""
        assert key not in self._block_of
        self.forget(block)
        self._block_of[key] = block
        self.by_block[block] = key

    def find(self, key: bytes) -> int | None:
        return self._block_of.get(key)

    def forget(self, block: int) -> None:
        if (key := self.by_block.pop(block, None)) is not None:
            del self._block_of[key]
