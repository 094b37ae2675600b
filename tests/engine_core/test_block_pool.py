"""The block pool against a plain model: a dictionary of counts and a list of free blocks."""

from __future__ import annotations

from itertools import count

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headwater.engine_core.kv.block_pool import NULL_BLOCK, BlockPool

NUM_BLOCKS = 12


def test_the_null_block_is_never_handed_out() -> None:
    pool = BlockPool(4)
    assert pool.num_usable == 3
    assert NULL_BLOCK == 0
    assert sorted(pool.allocate(3)) == [1, 2, 3]


def test_a_freed_block_can_still_be_hit() -> None:
    pool = BlockPool(4)
    (block,) = pool.allocate(1)
    pool.cache(block, b"one")
    pool.release([block])
    assert pool.num_free == 3
    assert pool.find(b"one") == block
    pool.share([block])
    assert pool.num_free == 2


def test_the_tail_of_a_prompt_is_evicted_before_its_head() -> None:
    pool = BlockPool(4)
    head, middle, tail = pool.allocate(3)
    for block, block_hash in ((head, b"head"), (middle, b"middle"), (tail, b"tail")):
        pool.cache(block, block_hash)
    pool.release([head, middle, tail])
    assert pool.allocate(2) == [tail, middle]
    assert pool.take_evicted() == [b"tail", b"middle"]
    assert pool.take_evicted() == []
    assert pool.find(b"head") == head


def test_blocks_that_cache_nothing_go_first() -> None:
    pool = BlockPool(4)
    cached, empty = pool.allocate(2)
    pool.cache(cached, b"cached")
    pool.release([cached])
    pool.release([empty])
    assert pool.allocate(1) == [empty]


def test_blocks_that_were_released_early_go_behind_those_and_before_others() -> None:
    pool = BlockPool(4)
    older, early, empty = pool.allocate(3)
    pool.cache(older, b"older")
    pool.cache(early, b"early")
    pool.release([older])
    pool.release([early], is_early=True)
    pool.release([empty])
    assert pool.allocate(2) == [empty, early]
    assert pool.take_evicted() == [b"early"]
    assert pool.allocate(1) == [older]


def test_a_second_block_of_the_same_hash_is_not_cached() -> None:
    pool = BlockPool(4)
    first, second = pool.allocate(2)
    assert pool.cache(first, b"same")
    assert not pool.cache(second, b"same")
    assert pool.find(b"same") == first


def test_freeing_twice_is_refused() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(AssertionError, match="freed twice"):
        pool.release(blocks)


class PoolAgainstModel(RuleBasedStateMachine):
    """Sequences take, share, cache and give back blocks in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.free = list(range(1, NUM_BLOCKS))
        self.holds = dict.fromkeys(self.free, 0)
        self.hash_of: dict[int, bytes] = {}
        self.evicted: list[bytes] = []
        self.held: list[list[int]] = []
        self.names = count()

    @rule(num_blocks=st.integers(0, 5))
    def allocate(self, num_blocks: int) -> None:
        if num_blocks > len(self.free):
            return
        expected = self.free[:num_blocks]
        self.free = self.free[num_blocks:]
        assert self.pool.allocate(num_blocks) == expected
        self.evicted += [self.hash_of.pop(block) for block in expected if block in self.hash_of]
        self.holds.update(dict.fromkeys(expected, 1))
        self.held.append(expected)

    @precondition(lambda self: any(self.held))
    @rule(data=st.data(), is_known=st.booleans())
    def cache(self, data: st.DataObject, is_known: bool) -> None:
        block = data.draw(st.sampled_from([block for blocks in self.held for block in blocks]))
        if block in self.hash_of:
            return
        known = list(self.hash_of.values()) if is_known else []
        block_hash = data.draw(st.sampled_from(known)) if known else b"%d" % next(self.names)
        assert self.pool.cache(block, block_hash) == (not known)
        if not known:
            self.hash_of[block] = block_hash

    @precondition(lambda self: self.hash_of)
    @rule(data=st.data())
    def hit(self, data: st.DataObject) -> None:
        blocks = data.draw(st.lists(st.sampled_from(sorted(self.hash_of)), unique=True))
        assert [self.pool.find(self.hash_of[block]) for block in blocks] == blocks
        assert self.pool.count_unheld(blocks) == sum(block in self.free for block in blocks)
        self.pool.share(blocks)
        self.free = [block for block in self.free if block not in blocks]
        for block in blocks:
            self.holds[block] += 1
        self.held.append(blocks)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), is_early=st.booleans())
    def release(self, data: st.DataObject, is_early: bool) -> None:
        blocks = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.pool.release(blocks, is_early=is_early)
        for block in reversed(blocks):
            self.holds[block] -= 1
            if self.holds[block] == 0:
                num_empty = sum(each not in self.hash_of for each in self.free)
                behind = num_empty if is_early else len(self.free)
                self.free.insert(behind if block in self.hash_of else 0, block)

    @rule()
    def take_evicted(self) -> None:
        assert self.pool.take_evicted() == self.evicted
        self.evicted = []

    @invariant()
    def counts_balance(self) -> None:
        assert self.pool.ref_counts[1:] == list(self.holds.values())
        assert self.pool.num_free == len(self.free)
        assert self.pool.num_used == NUM_BLOCKS - 1 - len(self.free)
        assert sorted(self.pool.cached_hashes()) == sorted(self.hash_of.values())


PoolAgainstModel.TestCase.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None
)
TestPoolAgainstModel = PoolAgainstModel.TestCase
