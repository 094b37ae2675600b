"""Blocks that leave the device for host memory, and when they come back, one fact at a time."""

from __future__ import annotations

import numpy as np

from headwater.engine_core.executor import SwapPlan
from headwater.engine_core.kv.block_loads import BlockLoads, SettledLoad
from headwater.engine_core.kv.block_pool import BlockPool
from headwater.engine_core.kv.block_source import Ticket
from headwater.engine_core.kv.host_blocks import HostBlocks
from headwater.engine_core.kv.prefix_cache import HashChain, HeldPages, Hits, PrefixCache

BLOCK_SIZE = 16


class RecordingSwapper:
    """Says that blocks came when the test says so."""

    direct_copies = None
    seconds_per_block = 0.25

    def __init__(self) -> None:
        self.plans: list[SwapPlan] = []
        self.num_saved = self.num_loaded = 0
        self.slots = np.arange(8, dtype=np.uint8).reshape(8, 1)

    def swap(self, plan: SwapPlan) -> None:
        self.plans.append(plan)


class Blocks:
    """Host memory beside a pool that sequences come and go in."""

    def __init__(self, num_blocks: int, num_slots: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.cache = PrefixCache(self.pool)
        self.swapper = RecordingSwapper()
        self.host = HostBlocks(self.swapper, num_slots)
        self.loads = BlockLoads(self.pool, self.cache, [self.host], lambda: 0.0)

    def compute(self, first_token: int, num_blocks: int) -> HashChain:
        """A sequence that comes, hits what the device has, computes the rest and leaves."""
        chain = chain_of(first_token, num_blocks)
        hits = self.cache.match(chain, num_blocks).pages
        self.pool.share(hits)
        chain.num_cached = len(hits)
        blocks = self.pool.allocate(num_blocks - len(hits))
        self.cache.announce(self.cache.offer(chain, blocks))
        self.loads.release(hits + blocks, chain.hashes, chain.owner)
        return chain

    def load(self, chain: HashChain, hits: list[int], end: int) -> Ticket:
        offer = self.loads.find(chain, len(hits), end)
        assert offer is not None
        return self.loads.load(offer, chain, Hits(len(hits), (HeldPages(0, len(hits), hits),)))

    def copies(self) -> SwapPlan | None:
        """What was launched now."""
        before = len(self.swapper.plans)
        self.loads.launch()
        return self.swapper.plans[-1] if len(self.swapper.plans) > before else None

    def out_blocks(self) -> list[int]:
        return [] if (plan := self.copies()) is None else plan.out_blocks.tolist()


def chain_of(first_token: int, num_blocks: int) -> HashChain:
    chain = HashChain(b"n" * 16)
    chain.cover(
        np.arange(first_token, first_token + num_blocks * BLOCK_SIZE, dtype=np.int32), BLOCK_SIZE
    )
    return chain


def test_free_blocks_are_copied_once_and_held_ones_are_not() -> None:
    blocks = Blocks(9, 8)
    chain = chain_of(0, 3)
    held = blocks.pool.allocate(3)
    blocks.cache.offer(chain, held)
    blocks.pool.share(held[:1])
    blocks.loads.release(held, chain.hashes, chain.owner)
    plan = blocks.copies()
    assert plan is not None
    assert (plan.out_blocks.tolist(), plan.out_slots.tolist()) == (held[1:], [0, 1])
    blocks.loads.release(held[:1], chain.hashes, chain.owner)
    assert blocks.out_blocks() == held[:1]
    blocks.pool.share(held)
    blocks.loads.release(held, chain.hashes, chain.owner)
    assert blocks.copies() is None


def test_where_slots_are_few_the_first_blocks_of_the_last_sequence_are_kept() -> None:
    blocks = Blocks(17, 3)
    old = blocks.compute(0, 2)
    new = blocks.compute(1000, 5)
    assert blocks.host.find(new.hashes) == 3
    assert blocks.host.find(old.hashes) == 0


def test_the_tail_of_what_was_used_least_recently_goes_first() -> None:
    blocks = Blocks(17, 5)
    first = blocks.compute(0, 2)
    second = blocks.compute(1000, 2)
    held = blocks.cache.match(first, 2).pages
    blocks.pool.share(held)
    blocks.loads.release(held, first.hashes, first.owner)
    blocks.compute(2000, 2)
    assert blocks.host.find(first.hashes) == 2
    assert blocks.host.find(second.hashes) == 1


def test_a_hash_is_announced_when_the_first_tier_has_it_and_removed_with_the_last() -> None:
    blocks = Blocks(5, 4)
    first = blocks.compute(0, 4)
    second = blocks.compute(1000, 2)
    events = blocks.cache.take_events()
    assert events is not None
    assert [chain.hashes for chain in events.stored] == [first.hashes, second.hashes]
    # The device lost the two last of the first, and so did host memory, to the second.
    assert sorted(events.removed) == sorted(first.hashes[2:])
    assert set(blocks.pool.cached_hashes()) == {*first.hashes[:2], *second.hashes}
    # The device forgets all of it and computes some anew, while host memory has it: nobody learns
    # anything.
    blocks.pool.release(blocks.pool.allocate(4))
    assert blocks.cache.match(second, 2).pages == []
    blocks.compute(1000, 2)
    assert blocks.cache.take_events() is None


def test_blocks_on_their_way_back_are_held_and_then_hit_by_anyone() -> None:
    blocks = Blocks(5, 8)
    chain = blocks.compute(0, 3)
    blocks.compute(1000, 4)
    blocks.copies()
    assert blocks.cache.match(chain, 3).pages == []
    ticket = blocks.load(chain, [], 3)
    plan = blocks.copies()
    assert plan is not None
    assert plan.in_slots.tolist() == [0, 1, 2]
    assert (blocks.pool.num_free, blocks.loads.is_any_open) == (1, True)
    assert blocks.loads.ticket(chain.hashes[0]) is ticket
    assert blocks.loads.find(chain, 0, 3) is None, "nobody fetches them twice"
    blocks.swapper.num_loaded = 2
    assert blocks.loads.poll() == []
    blocks.swapper.num_loaded = 3
    assert blocks.loads.poll() == [SettledLoad(ticket, None)]
    assert blocks.cache.match(chain, 3).pages == plan.in_blocks.tolist()
    assert (blocks.pool.num_free, blocks.loads.is_any_open) == (4, False)


def test_neighbours_that_are_saved_and_loaded_are_one_plan_of_copies() -> None:
    blocks = Blocks(9, 8)
    chains = [blocks.compute(first_token, 2) for first_token in (0, 1000)]
    plan = blocks.copies()
    assert plan is not None
    assert plan.out_slots.tolist() == [0, 1, 2, 3]
    blocks.pool.release(blocks.pool.allocate(8))
    for chain in chains:
        blocks.load(chain, [], 2)
    plan = blocks.copies()
    assert plan is not None
    assert (plan.in_slots.tolist(), len(blocks.swapper.plans)) == ([0, 1, 2, 3], 2)


def test_saves_of_one_launch_go_to_slots_in_their_order_the_last_one_of_a_slot_last() -> None:
    blocks = Blocks(17, 4)
    blocks.compute(0, 2)
    old = blocks.compute(1000, 2)
    new = blocks.compute(2000, 3)
    plan = blocks.copies()
    assert plan is not None
    assert plan.out_slots.tolist() == [0, 0, 1, 1, 2, 3, 3]
    last = dict(zip(plan.out_slots.tolist(), plan.out_blocks.tolist(), strict=True))
    assert [last[slot] for slot in slots_of(blocks, new)] == blocks.cache.match(new, 3).pages
    assert [last[slot] for slot in slots_of(blocks, old)] == blocks.cache.match(old, 1).pages


def slots_of(blocks: Blocks, chain: HashChain) -> list[int]:
    return [
        blocks.host._slot_of[block_hash]
        for block_hash in chain.hashes
        if block_hash in blocks.host.held
    ]


def test_slots_that_are_read_are_not_given_away() -> None:
    blocks = Blocks(9, 3)
    chain = blocks.compute(0, 2)
    first = blocks.compute(500, 1)
    blocks.pool.release(blocks.pool.allocate(8))
    blocks.pool.allocate(5)
    ticket = blocks.load(chain, [], 2)
    other = blocks.compute(2000, 1)
    assert (blocks.host.find(other.hashes), blocks.host.find(first.hashes)) == (1, 0)
    blocks.swapper.num_loaded = 2
    assert blocks.loads.poll() == [SettledLoad(ticket, None)]
    assert blocks.host.find(chain.hashes) == 2


def test_a_block_is_lent_once_its_copy_is_made_and_stays_until_it_is_let_go_of() -> None:
    blocks = Blocks(9, 2)
    chain = blocks.compute(0, 2)
    assert blocks.host.hold(chain.hashes) == []
    blocks.loads.launch()
    blocks.swapper.num_saved = 1
    assert len(blocks.host.hold(chain.hashes)) == 1
    blocks.swapper.num_saved = 2
    reads = blocks.host.hold(chain.hashes[1:])
    # Both slots are read: what comes later finds none.
    blocks.compute(1000, 2)
    assert set(blocks.host.held) == set(chain.hashes)
    into = bytearray(1)
    assert [read(memoryview(into)) for read in reads] == [True]
    assert into[0] == 1
    for block_hash in chain.hashes:
        blocks.host.let_go([block_hash])
    later = blocks.compute(2000, 2)
    assert set(blocks.host.held) == set(later.hashes)


def test_a_sequence_that_is_longer_than_host_memory_keeps_its_beginning() -> None:
    blocks = Blocks(17, 4)
    for num_blocks in (4, 5, 8, 8):
        chain = blocks.compute(0, num_blocks)
        assert blocks.host.find(chain.hashes) == 4


def test_what_a_load_holds_is_copied_when_it_alone_held_it() -> None:
    blocks = Blocks(9, 8)
    whole = blocks.compute(0, 4)
    blocks.copies()
    blocks.pool.release(blocks.pool.allocate(8))
    chain = chain_of(0, 4)
    held = blocks.pool.allocate(2)
    blocks.cache.offer(chain, held)
    del blocks.host._slot_of[chain.hashes[0]]
    blocks.load(chain, held, 4)
    blocks.loads.release(held, chain.hashes, chain.owner)
    assert blocks.out_blocks() == []
    blocks.swapper.num_loaded = 2
    blocks.loads.poll()
    assert blocks.out_blocks() == held[:1]
    assert blocks.host.find(whole.hashes) == 4


def test_a_load_costs_what_the_swapper_says_of_a_block_and_waits_for_those_before_it() -> None:
    blocks = Blocks(9, 8)
    chain = blocks.compute(0, 4)
    blocks.pool.release(blocks.pool.allocate(8))
    assert blocks.host.cost(2) == 0.5
    blocks.load(chain, [], 3)
    assert blocks.host.cost(2) == 1.25
    blocks.swapper.num_loaded = 3
    blocks.loads.poll()
    assert blocks.host.cost(2) == 0.5


def test_a_copy_that_is_cancelled_holds_slots_and_blocks_until_it_is_done() -> None:
    blocks = Blocks(5, 2)
    chain = blocks.compute(0, 2)
    blocks.pool.release(blocks.pool.allocate(4))
    blocks.load(chain, [], 2)
    (ticket,) = blocks.loads._open
    blocks.host.cancel(ticket)
    blocks.compute(1000, 2)
    assert (blocks.host.find(chain.hashes), blocks.loads.poll(), blocks.pool.num_free) == (2, [], 2)
    blocks.swapper.num_loaded = 2
    assert blocks.loads.poll() == [SettledLoad(ticket, blocks.host)]
    assert (blocks.cache.match(chain, 2).pages, blocks.pool.num_free) == ([], 4)
    blocks.compute(2000, 2)
    assert blocks.host.find(chain.hashes) == 0, "its slots are given away again"


# Through an engine.
