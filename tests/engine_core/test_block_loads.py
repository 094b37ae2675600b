"""Loads from block sources, one fact at a time: which source is asked, how a load ends, what is
held meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from headwater.engine_core.kv.block_loads import (
    MIN_PATIENCE_SECONDS,
    BlockLoads,
    Offer,
    SettledLoad,
)
from headwater.engine_core.kv.block_pool import BlockPool
from headwater.engine_core.kv.block_source import LoadEnd, Outcome, Owner, Ticket
from headwater.engine_core.kv.prefix_cache import HashChain, HeldPages, Hits, PrefixCache
from headwater.engine_core.kv.value.recompute import RecomputeCosts
from headwater.engine_core.kv.value.tier_order import NO_TURN, GivenBack
from headwater.engine_core.kv.value.turn import UNKNOWN, Turn
from headwater.engine_core.step_output import StoredChain
from tests.engine_core.lying_source import ScriptedSource

BLOCK_SIZE = 16
NUM_BLOCKS = 17
OTHER = b"o" * 16


class Blocks:
    """A pool with sources beside it."""

    def __init__(
        self,
        *sources: ScriptedSource,
        compute_seconds: float = 0.0,
        costs: RecomputeCosts | None = None,
    ) -> None:
        self.now = 0.0
        self.pool = BlockPool(NUM_BLOCKS, costs)
        self.cache = PrefixCache(self.pool)
        self.loads = BlockLoads(
            self.pool, self.cache, sources, lambda: self.now, lambda: compute_seconds
        )

    def load(self, chain: HashChain, hits: Sequence[int] = ()) -> Ticket:
        offer = self.loads.find(chain, len(hits), len(chain.hashes))
        assert offer is not None
        return self.loads.load(
            offer, chain, Hits(len(hits), (HeldPages(0, len(hits), list(hits)),))
        )

    def match(self, chain: HashChain) -> int:
        return self.cache.match(chain, len(chain.hashes)).num_blocks


def source_of(
    *chains: HashChain, seconds_per_block: float = 0.0, is_local: bool = True
) -> ScriptedSource:
    """Holds the blocks of these chains."""
    kv_blocks = np.zeros((NUM_BLOCKS, 1), np.uint64)
    source = ScriptedSource(kv_blocks, seconds_per_block=seconds_per_block, is_local=is_local)
    for chain in chains:
        parents = [chain.parent_of(idx) for idx in range(len(chain.hashes))]
        source.save(chain.hashes, range(1, len(chain.hashes) + 1), parents, chain.owner)
    source.launch()
    return source


def chain_of(first_token: int, num_blocks: int) -> HashChain:
    chain = HashChain(b"n" * 16)
    chain.cover(
        np.arange(first_token, first_token + num_blocks * BLOCK_SIZE, dtype=np.int32), BLOCK_SIZE
    )
    return chain


LONG = chain_of(0, 4)
SHORT = chain_of(0, 2)


def test_the_source_that_holds_the_most_is_asked_and_of_equals_the_cheapest() -> None:
    dear = source_of(LONG, seconds_per_block=2.0)
    cheap = source_of(LONG, seconds_per_block=1.0)
    small = source_of(SHORT, seconds_per_block=0.1)
    loads = Blocks(dear, small, cheap).loads
    assert loads.find(LONG, 0, 4) == Offer(cheap, 4, 4.0)
    assert loads.find(LONG, 0, 2) == Offer(small, 2, 0.2)
    assert loads.find(LONG, 0, 4, excluded=[cheap]) == Offer(dear, 4, 8.0)
    assert loads.find(LONG, 0, 4, excluded=[cheap, dear, small]) is None
    assert loads.find(LONG, 4, 4) is None


def test_the_first_of_equal_sources_is_asked() -> None:
    first = source_of(LONG)
    second = source_of(LONG)
    assert Blocks(first, second).loads.find(LONG, 0, 4) == Offer(first, 4, 0.0)


def test_what_is_computed_in_less_time_is_not_loaded() -> None:
    slow = source_of(LONG, seconds_per_block=2.0)
    fast = source_of(SHORT, seconds_per_block=0.5)
    loads = Blocks(slow, fast, compute_seconds=1.0).loads
    assert loads.find(LONG, 0, 4) == Offer(fast, 2, 1.0)
    assert loads.find(LONG, 2, 4) is None
    assert Blocks(slow, fast).loads.find(LONG, 0, 4) == Offer(slow, 4, 8.0), (
        "where it is not known, they are"
    )


class CountedSource(ScriptedSource):
    num_saves = num_launches = 0

    def save(
        self,
        hashes: Sequence[bytes],
        blocks: Sequence[int],
        parents: Sequence[bytes],
        owner: Owner,
        given: GivenBack = NO_TURN,
    ) -> None:
        super().save(hashes, blocks, parents, owner, given)
        self.num_saves += 1

    def launch(self) -> None:
        super().launch()
        self.num_launches += 1


class ImmediateSource(ScriptedSource):
    """A source whose loads end at once, as copies within host memory do."""

    def launch(self) -> None:
        super().launch()
        for ticket in list(self.open):
            self.end(ticket)


def test_a_load_does_not_overwrite_what_another_source_has_yet_to_copy() -> None:
    """The blocks of a finished sequence are the only free ones, and the load takes all of them."""
    kv_blocks = np.zeros((NUM_BLOCKS, 1), np.uint64)
    first = ImmediateSource(kv_blocks)
    second = ScriptedSource(kv_blocks)
    blocks = Blocks(first, second)
    left = chain_of(0, 16)
    wanted = chain_of(1000, 16)
    kv_blocks[1:] = 7
    first.save(wanted.hashes, range(1, NUM_BLOCKS), [b"", *wanted.hashes[:-1]], wanted.owner)
    first.launch()
    kv_blocks[1:] = 5
    cache_and_release(blocks, left)
    blocks.load(wanted)
    blocks.loads.launch()
    assert kv_blocks[1:].tolist() == [[7]] * 16
    for source in (first, second):
        assert [int(source._contents[each][0]) for each in left.hashes] == [5] * 16


def cache_and_release(blocks: Blocks, chain: HashChain) -> None:
    taken = blocks.pool.allocate(len(chain.hashes))
    blocks.cache.adopt(b"", chain.hashes, taken)
    blocks.loads.release(taken, chain.hashes, chain.owner)


def test_blocks_that_move_stay_in_their_tenants_share() -> None:
    lent, loaded, early = (
        replace(chain_of(first, 4), tenant="a", turn=turn)
        for first, turn in (
            (0, Turn("a", weight=3.0)),
            (100, Turn("a", weight=3.0, session="s")),
            (200, UNKNOWN),
        )
    )
    source = source_of(loaded, early)
    blocks = Blocks(source, costs=RecomputeCosts())
    values = blocks.pool.values
    assert values is not None
    taken = blocks.pool.allocate(4)
    blocks.cache.adopt(b"", lent.hashes, taken)
    blocks.pool.release(taken, turn=lent.turn)
    blocks.pool.share(taken, is_move=True)
    blocks.loads.release(taken, lent.hashes, lent.owner)
    for chain in (loaded, early):
        source.end(blocks.load(chain))
    blocks.loads.poll()
    assert (values.num_of("a"), values.num_of("")) == (12, 0)


def test_sources_are_launched_when_they_were_asked_for_something_and_while_loads_are_open() -> None:
    source = CountedSource(np.zeros((NUM_BLOCKS, 1), np.uint64))
    blocks = Blocks(source)
    blocks.loads.launch()
    assert source.num_launches == 0
    cache_and_release(blocks, LONG)
    blocks.loads.launch()
    blocks.loads.launch()
    assert (source.num_saves, source.num_launches) == (1, 1)
    blocks = Blocks(source)
    ticket = blocks.load(LONG)
    for num_launches in (2, 3, 4):
        blocks.loads.launch()
        assert source.num_launches == num_launches
    source.end(ticket)
    blocks.loads.poll()
    blocks.loads.launch()
    blocks.loads.launch()
    assert source.num_launches == 4


def test_blocks_are_offered_to_sources_that_keep_some_and_to_no_others() -> None:
    keeper, reader = (CountedSource(np.zeros((NUM_BLOCKS, 1), np.uint64)) for _ in range(2))
    reader.keeps_blocks = False
    cache_and_release(Blocks(keeper, reader), LONG)
    assert (keeper.num_saves, reader.num_saves) == (1, 0)
    assert list(keeper.held) == LONG.hashes


def test_cached_blocks_that_no_request_holds_are_offered() -> None:
    source = CountedSource(np.zeros((NUM_BLOCKS, 1), np.uint64))
    blocks = Blocks(source)
    first = blocks.pool.allocate(2)
    blocks.cache.adopt(b"", SHORT.hashes, first)
    # Another sequence begins with the same tokens, which it has computed anew in its second block.
    blocks.pool.share(first[:1])
    second = [first[0], *blocks.pool.allocate(3)]
    blocks.cache.adopt(SHORT.hashes[-1], LONG.hashes[2:], second[2:])
    blocks.loads.release(second, LONG.hashes, LONG.owner)
    assert list(source.held) == LONG.hashes[2:]
    blocks.loads.release(first, SHORT.hashes, SHORT.owner)
    assert list(source.held) == [*LONG.hashes[2:], *SHORT.hashes]


def test_loads_end_in_any_order() -> None:
    source = source_of(first := chain_of(0, 2), second := chain_of(900, 3))
    blocks = Blocks(source)
    tickets = blocks.load(first), blocks.load(second)
    source.end(tickets[1])
    assert blocks.loads.poll() == [SettledLoad(tickets[1], None)]
    assert (blocks.match(first), blocks.match(second)) == (0, 3)
    source.end(tickets[0])
    assert blocks.loads.poll() == [SettledLoad(tickets[0], None)]
    assert (blocks.match(first), blocks.pool.num_used) == (2, 0)


@pytest.mark.parametrize(
    ("outcome", "reported", "num_cached"),
    [
        (Outcome.LOADED, LONG.hashes, 4),
        (Outcome.LOADED, LONG.hashes[:3], 3),
        (Outcome.LOADED, [], 0),
        (Outcome.LOADED, [*LONG.hashes[:3], OTHER], 0),
        (Outcome.LOADED, [OTHER, *LONG.hashes[1:]], 0),
        (Outcome.LOADED, LONG.hashes[1:], 0),
        (Outcome.LOADED, [*LONG.hashes, OTHER], 0),
        (Outcome.FAILED, LONG.hashes, 0),
        (Outcome.CANCELLED, LONG.hashes, 0),
    ],
    ids=[
        "all",
        "leading",
        "none",
        "another last",
        "another first",
        "shifted",
        "too many",
        "failed",
        "cancelled",
    ],
)
def test_leading_blocks_are_cached_that_are_what_was_asked_for(
    outcome: Outcome, reported: list[bytes], num_cached: int
) -> None:
    blocks = Blocks(source := source_of(LONG))
    ticket = blocks.load(LONG)
    assert blocks.pool.num_used == 4
    source.end(ticket, outcome, reported)
    assert blocks.loads.poll() == [SettledLoad(ticket, None if num_cached == 4 else source)]
    assert (blocks.match(LONG), blocks.pool.num_used, blocks.loads.is_any_open) == (
        num_cached,
        0,
        False,
    )
    assert blocks.loads.find(LONG, num_cached, 4, excluded=[source]) is None


def test_cached_blocks_before_those_that_are_loaded_stay_meanwhile() -> None:
    blocks = Blocks(source := source_of(LONG))
    hits = blocks.pool.allocate(2)
    blocks.cache.offer(chain := chain_of(0, 2), hits)
    blocks.pool.release(hits)
    ticket = blocks.load(LONG, hits)
    assert (ticket.hashes, blocks.pool.num_used) == (LONG.hashes[2:], 4)
    blocks.pool.release(blocks.pool.allocate(blocks.pool.num_free))
    source.end(ticket)
    blocks.loads.poll()
    assert (blocks.match(chain), blocks.match(LONG), blocks.pool.num_used) == (2, 4, 0)


def test_a_load_that_takes_far_too_long_is_given_up_and_its_blocks_stay_held_until_it_ends() -> (
    None
):
    blocks = Blocks(source := source_of(LONG, seconds_per_block=1.0))
    ticket = blocks.load(LONG)
    blocks.now = 39.9
    assert (blocks.loads.poll(), source.cancelled) == ([], [])
    blocks.now = 40.0
    assert blocks.loads.poll() == [SettledLoad(ticket, source)]
    assert (source.cancelled, blocks.loads.ticket(LONG.hashes[0]), blocks.pool.num_used) == (
        [ticket],
        None,
        4,
    )
    assert blocks.loads.poll() == []
    # Meanwhile another asks for the same, and its load is not mistaken for the late one.
    again = blocks.load(LONG)
    source.end(ticket)
    assert blocks.loads.poll() == [SettledLoad(ticket, source)]
    assert (blocks.match(LONG), blocks.pool.num_used) == (0, 4)
    source.end(again)
    assert blocks.loads.poll() == [SettledLoad(again, None)]
    assert (blocks.match(LONG), blocks.pool.num_used) == (4, 0)


def test_a_load_that_costs_nothing_has_its_time_too() -> None:
    blocks = Blocks(source_of(LONG))
    ticket = blocks.load(LONG)
    blocks.now = MIN_PATIENCE_SECONDS - 0.1
    assert blocks.loads.poll() == []
    blocks.now = MIN_PATIENCE_SECONDS
    assert [load.ticket for load in blocks.loads.poll()] == [ticket]


def test_blocks_of_others_are_announced_when_loaded_and_removed_when_evicted() -> None:
    """Those of this engine's own sources were told when they were computed."""
    own = chain_of(0, 2)
    foreign = chain_of(900, 4)
    blocks = Blocks(local := source_of(own), peer := source_of(foreign, is_local=False))
    assert set(blocks.pool.cached_hashes()) == set(own.hashes)
    tickets = blocks.load(own), blocks.load(foreign)
    local.end(tickets[0])
    peer.end(tickets[1], Outcome.LOADED, foreign.hashes[:3])
    blocks.loads.poll()
    events = blocks.cache.take_events()
    assert events is not None
    assert events.stored == [StoredChain(parent=b"", hashes=foreign.hashes[:3])]
    # The peer's and the device's memory are two things.
    peer.lose(foreign.hashes[0])
    assert blocks.cache.take_events() is None
    blocks.pool.release(blocks.pool.allocate(blocks.pool.num_free))
    events = blocks.cache.take_events()
    assert events is not None
    assert (sorted(events.removed), events.stored) == (sorted(foreign.hashes[:3]), [])


def test_sources_of_blocks_of_others_are_not_asked_for_each_hash() -> None:
    blocks = Blocks(local := source_of(LONG), source_of(SHORT, is_local=False))
    assert blocks.pool.elsewhere is local.held
    assert Blocks(source_of(SHORT, is_local=False)).pool.elsewhere == ()


def test_a_hash_is_lost_when_the_last_source_loses_it() -> None:
    first = source_of(LONG)
    second = source_of(LONG)
    blocks = Blocks(first, second)
    assert sorted(blocks.pool.cached_hashes()) == sorted(LONG.hashes)
    assert len(blocks.pool.elsewhere) == 4
    first.lose(LONG.hashes[0])
    assert blocks.cache.take_events() is None
    second.lose(LONG.hashes[0])
    events = blocks.cache.take_events()
    assert events is not None
    assert events.removed == LONG.hashes[:1]


def test_every_source_is_offered_unused_blocks() -> None:
    first = source_of()
    second = source_of()
    blocks = Blocks(first, second)
    held = blocks.pool.allocate(4)
    blocks.cache.offer(chain := chain_of(0, 4), held)
    blocks.loads.release(held, chain.hashes, chain.owner)
    assert (first.find(chain.hashes), second.find(chain.hashes)) == (4, 4)


def test_closing_cancels_what_is_on_its_way() -> None:
    blocks = Blocks(busy := source_of(LONG), idle := source_of())
    ticket = blocks.load(LONG)
    blocks.loads.close()
    assert (busy.cancelled, busy.is_closed, idle.cancelled, idle.is_closed) == (
        [ticket],
        True,
        [],
        True,
    )


def test_a_ticket_that_ends_twice_is_a_defect_of_its_source() -> None:
    blocks = Blocks(source := source_of(LONG))
    ticket = blocks.load(LONG)
    source.end(ticket)
    blocks.loads.poll()
    source._ends.append(LoadEnd(ticket, Outcome.FAILED))
    with pytest.raises(KeyError):
        blocks.loads.poll()


def test_what_others_wait_for_meanwhile_counts_where_a_source_spares_it() -> None:
    slow = source_of(LONG, seconds_per_block=2.0)
    loads = Blocks(slow, compute_seconds=1.0).loads
    loads.num_decoding = lambda: 3
    assert loads.find(LONG, 0, 4) is None
    slow.spares_steps = True
    assert loads.find(LONG, 0, 4) == Offer(slow, 4, 8.0)
