"""Marks beside the events of blocks: when they are announced, and what is remembered for them."""

from __future__ import annotations

from headwater.engine_core.kv.block_pool import BlockPool
from headwater.engine_core.kv.continuations import Continuations
from headwater.engine_core.kv.prefix_hash import mark_of
from headwater.engine_core.page_groups import page_key
from headwater.engine_core.step_output import StoredChain

HASH = b"0123456789abcdef"
MARK = mark_of(HASH, 1)
NUM_PAGES = 4


class Events:
    """A pool with two page groups, of which the second is a kind of its own."""

    def __init__(self) -> None:
        self.pool = BlockPool(NUM_PAGES)
        self.continuations = Continuations(self.pool, [range(1, 2)])

    def cache(self, *keys: bytes) -> list[int]:
        pages = self.pool.allocate(len(keys))
        for key, page in zip(keys, pages, strict=True):
            if key == HASH:
                self.pool.cache(page, key)
            else:
                self.pool.cache_page(page, key)
        return pages

    def follow(self, *announced: bytes) -> tuple[list[bytes], list[bytes]]:
        """Hashes that are stored and removed, with those of marks."""
        stored = [StoredChain(b"", [each]) for each in announced]
        removed = self.pool.take_evicted()
        self.continuations.add_marks(stored, removed)
        return [each for chain in stored for each in chain.hashes], removed

    @property
    def num_remembered(self) -> int:
        return len(self.continuations._marks) + len(self.continuations._early)


def test_a_mark_is_announced_with_its_block_or_later() -> None:
    events = Events()
    events.cache(page_key(HASH, 1))
    assert events.follow() == ([], [])
    events.cache(HASH)
    assert events.follow(HASH) == ([HASH, MARK], [])
    other = Events()
    other.cache(HASH)
    assert other.follow(HASH) == ([HASH], [])
    other.cache(page_key(HASH, 1))
    assert other.follow() == ([MARK], [])


def test_a_mark_goes_with_its_pages_or_its_block_and_comes_back_with_the_block() -> None:
    events = Events()
    (first,) = events.cache(HASH)
    (second,) = events.cache(page_key(HASH, 1))
    events.follow(HASH)
    events.pool.release([first])
    events.pool.release(events.pool.allocate(NUM_PAGES - 2))
    assert events.follow() == ([], [HASH, MARK])
    (first,) = events.cache(HASH)
    assert events.follow(HASH) == ([HASH, MARK], [])
    events.pool.release([second])
    events.pool.allocate(NUM_PAGES - 2)
    assert events.follow() == ([], [MARK])


def test_nothing_is_remembered_of_what_is_gone() -> None:
    events = Events()
    (first,) = events.cache(HASH)
    (second,) = events.cache(page_key(HASH, 1))
    events.follow(HASH)
    for page in (first, second):
        events.pool.release([page])
        held = events.pool.allocate(events.pool.num_free)
        events.follow()
        events.pool.release(held)
    assert events.num_remembered == 0
