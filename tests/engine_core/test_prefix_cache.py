from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.engine_core.kv.block_pool import BlockPool
from headwater.engine_core.kv.prefix_cache import HashChain, PrefixCache
from headwater.engine_core.kv.prefix_hash import Front, block_hashes, num_common
from headwater.engine_core.step_output import StoredChain

NAMESPACE = b"n" * 16
BLOCK_SIZE = 16


def chain_of(num_blocks: int, *, first_token: int = 0) -> HashChain:
    chain = HashChain(NAMESPACE)
    chain.cover(
        np.arange(first_token, first_token + num_blocks * BLOCK_SIZE, dtype=np.int32), BLOCK_SIZE
    )
    return chain


@pytest.fixture
def pool() -> BlockPool:
    return BlockPool(32)


@pytest.fixture
def cache(pool: BlockPool) -> PrefixCache:
    return PrefixCache(pool)


@given(st.lists(st.integers(0, 100), max_size=100), st.data())
def test_a_chain_that_grows_equals_one_made_at_once(
    token_ids: list[int], data: st.DataObject
) -> None:
    chain = HashChain(NAMESPACE)
    for end in sorted(data.draw(st.lists(st.integers(0, len(token_ids)), max_size=5))):
        chain.cover(np.array(token_ids[:end], np.int32), BLOCK_SIZE)
    chain.cover(np.array(token_ids, np.int32), BLOCK_SIZE)
    assert chain.hashes == block_hashes(NAMESPACE, token_ids, BLOCK_SIZE)


@given(st.lists(st.integers(0, 100), max_size=100), st.integers(1, 8), st.data())
def test_a_chain_with_a_front_that_grows_equals_one_made_at_once(
    token_ids: list[int], num_front: int, data: st.DataObject
) -> None:
    front = Front(b"f" * 16, num_front)
    chain = HashChain(NAMESPACE, front=front)
    cache = PrefixCache(pool := BlockPool(32))
    for end in sorted(data.draw(st.lists(st.integers(0, len(token_ids)), max_size=5))):
        chain.cover(np.array(token_ids[:end], np.int32), BLOCK_SIZE)
    chain.num_cached = len(chain.hashes)
    whole = len(token_ids) // BLOCK_SIZE
    for idx in range(len(chain.hashes), whole):
        block = np.array(token_ids[idx * BLOCK_SIZE : (idx + 1) * BLOCK_SIZE], np.int32)
        cache.append([chain], block, pool.allocate(1))
    assert chain.hashes == block_hashes(NAMESPACE, token_ids, BLOCK_SIZE, front)
    other = block_hashes(b"o" * 16, token_ids, BLOCK_SIZE, front)
    assert num_common(chain.hashes, other) == min(whole, num_front)


def test_a_match_ends_at_the_first_missing_block(pool: BlockPool, cache: PrefixCache) -> None:
    chain = chain_of(4)
    blocks = pool.allocate(3)
    cache.offer(chain, blocks)
    assert cache.match(chain_of(4), max_blocks=4).pages == blocks
    assert cache.match(chain_of(4), max_blocks=2).pages == blocks[:2]
    assert cache.match(chain_of(4, first_token=1), max_blocks=4).pages == []


def test_two_namespaces_share_nothing(pool: BlockPool, cache: PrefixCache) -> None:
    cache.offer(chain_of(2), pool.allocate(2))
    other = HashChain(b"o" * 16)
    other.cover(np.arange(2 * BLOCK_SIZE, dtype=np.int32), BLOCK_SIZE)
    assert cache.match(other, max_blocks=2).pages == []


def test_blocks_offered_piece_by_piece_are_announced_as_one_chain_each(
    pool: BlockPool, cache: PrefixCache
) -> None:
    chain = chain_of(3)
    assert cache.offer(chain, pool.allocate(2)) == [
        StoredChain(parent=b"", hashes=chain.hashes[:2])
    ]
    assert cache.offer(chain, pool.allocate(1)) == [
        StoredChain(parent=chain.hashes[1], hashes=chain.hashes[2:])
    ]
    assert chain.num_cached == 3


def test_a_block_that_is_cached_already_is_not_announced_again(
    pool: BlockPool, cache: PrefixCache
) -> None:
    cache.offer(chain_of(2), pool.allocate(2))
    again = chain_of(4)
    assert cache.offer(again, pool.allocate(4)) == [
        StoredChain(parent=again.hashes[1], hashes=again.hashes[2:])
    ]


def test_a_block_that_is_cached_in_the_middle_splits_the_announced_chain(
    pool: BlockPool, cache: PrefixCache
) -> None:
    middle = chain_of(2)
    middle.num_cached = 1
    cache.offer(middle, pool.allocate(1))
    chain = chain_of(3)
    assert cache.offer(chain, pool.allocate(3)) == [
        StoredChain(parent=b"", hashes=chain.hashes[:1]),
        StoredChain(parent=chain.hashes[1], hashes=chain.hashes[2:]),
    ]


def test_events_leave_once_and_only_what_was_announced(pool: BlockPool, cache: PrefixCache) -> None:
    chain = chain_of(2)
    stored = cache.offer(chain, pool.allocate(2))
    assert cache.take_events() is None
    cache.announce(stored)
    events = cache.take_events()
    assert events is not None
    assert events.stored == stored
    assert events.removed == []
    assert cache.take_events() is None


@pytest.mark.parametrize(
    ("ours", "theirs", "shared"),
    [(chain_of(3), chain_of(5), 3), (chain_of(3), chain_of(3, first_token=1), 0)],
)
def test_shared_blocks_are_counted_from_the_front(
    ours: HashChain, theirs: HashChain, shared: int
) -> None:
    assert ours.num_shared(theirs) == shared
