"""Eviction by value: which blocks go first, against what is known of their turns."""

from __future__ import annotations

from itertools import count

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headwater.engine_core.kv.block_pool import BlockPool
from headwater.engine_core.kv.value.block_notes import BlockNotes
from headwater.engine_core.kv.value.recompute import RecomputeCosts
from headwater.engine_core.kv.value.return_times import (
    EDGES,
    NUM_BUCKETS,
    PRIOR_HAZARD,
    ReturnClasses,
    ReturnTimes,
    Sample,
    bucket_of,
    rates_of,
)
from headwater.engine_core.kv.value.turn import UNKNOWN, Turn, moved

AGENT = Turn(kind="tool")
PERSON = Turn(kind="person")


class Cache:
    """A pool whose chains are numbers: block i of chain c is cached by their hash."""

    def __init__(
        self, num_blocks: int, pivot: float = 1e9, times: ReturnClasses | None = None
    ) -> None:
        self.pool = BlockPool(num_blocks + 1, RecomputeCosts(pivot), times)
        assert self.pool.values is not None
        self.values = self.pool.values

    def use(self, chain: list[bytes], now: float, turn: Turn = UNKNOWN) -> int:
        """Serves a chain at once; returns how many of its blocks were found."""
        self.values.now = now
        hits = self.pool.find_leading(chain)
        self.pool.share(hits)
        added = self.pool.allocate(len(chain) - len(hits))
        for block, block_hash in zip(added, chain[len(hits) :], strict=True):
            self.pool.cache(block, block_hash)
        self.pool.release(hits + added, turn=turn)
        return len(hits)

    def evict(self, count: int) -> list[bytes]:
        """Hashes that so many more blocks take the place of."""
        self.pool.take_evicted()
        blocks = self.pool.allocate(count)
        evicted = self.pool.take_evicted()
        self.pool.release(blocks)
        return evicted


def chain_of(name: str, length: int, prefix: list[bytes] | None = None) -> list[bytes]:
    before = prefix or []
    return [*before, *(f"{name}{idx}".encode() for idx in range(len(before), length))]


def learnt(cache: Cache, turn: Turn, gap: float, num_turns: int = 40) -> float:
    """Lets sessions return after `gap` seconds each time, and leave; returns the time after."""
    now = cache.values.now + 1
    for number in range(num_turns):
        chain = chain_of(f"{turn.kind}{number}", 2)
        cache.use(chain, now, turn)
        now += gap
        cache.use(chain, now, turn)
        now += gap
    return now


def test_a_rate_is_highest_before_returns_are_due_and_falls_behind_them() -> None:
    due = bucket_of(30.0)
    rates = rates_of([0.9 if idx == due else 0.001 for idx in range(NUM_BUCKETS)])
    assert rates[due] == max(rates)
    assert sorted(rates[: due + 1]) == rates[: due + 1]
    assert rates[due + 1] < rates[0] / 5


def test_a_rate_of_one_return_is_its_chance_over_the_time_until_it() -> None:
    rates = rates_of([0.0] * 10 + [0.9] + [0.0] * (NUM_BUCKETS - 11))
    assert rates[10] == pytest.approx(0.9 / (EDGES[11] - EDGES[10]), rel=2.6 * 0.9)
    assert rates[0] == pytest.approx(0.9 / EDGES[10], rel=0.2)


def test_without_knowledge_the_oldest_goes_first() -> None:
    cache = Cache(6)
    for at, name in enumerate("abc"):
        cache.use(chain_of(name, 2), at * 10.0)
    cache.values.now = 40.0
    assert cache.evict(4) == [b"a1", b"a0", b"b1", b"b0"]


def test_return_times_are_learnt_of_stays_that_were_evicted_too() -> None:
    times = ReturnTimes()
    for number in range(300):
        sample = Sample(number * 1.0)
        times.begin(sample)
        sample.end(number + 5.0, has_returned=True)
    assert times.rates[0] == pytest.approx(1 / 5, rel=0.4)
    assert times.rates[bucket_of(60.0)] < times.rates[0] / 10


def test_blocks_of_turns_that_return_soon_stay_while_older_others_go_and_younger_ones_too() -> None:
    cache = Cache(600)
    learnt(cache, AGENT, 2.0)
    now = learnt(cache, PERSON, 600.0)
    cache.use(chain_of("slow", 4), now, PERSON)
    cache.use(chain_of("quick", 4), now + 1, AGENT)
    cache.use(chain_of("new", 4), now + 1.5, PERSON)
    cache.values.now = now + 2
    evicted = cache.evict(596)
    assert not {f"quick{idx}".encode() for idx in range(4)} & set(evicted)


def test_the_tail_of_a_chain_goes_before_its_head() -> None:
    cache = Cache(8)
    cache.use(chain_of("a", 8), 0.0)
    assert cache.evict(8) == list(reversed(chain_of("a", 8)))


def test_the_longer_of_two_chains_of_one_age_stays_cached() -> None:
    cache = Cache(44, pivot=10)
    cache.use(chain_of("long", 40), 0.0)
    cache.use(chain_of("short", 4), 0.0)
    assert cache.evict(4) == list(reversed(chain_of("short", 4)))


def test_a_block_that_is_placed_costs_the_returns_that_it_prevents() -> None:
    cache = Cache(64)
    now = learnt(cache, AGENT, 2.0)
    chains = [chain_of(f"due{number}", 2) for number in range(32)]
    for chain in chains:
        cache.use(chain, now, AGENT)
    cache.values.now = now + 1
    cost_of_due = cache.pool.eviction_cost
    assert 0.2 < cost_of_due <= 1
    # Each conversation returns once, as those before.
    for chain in chains:
        cache.use(chain, now + 2, AGENT)
    cache.values.now = now + 3
    assert cache.pool.eviction_cost < cost_of_due / 5


def test_a_block_that_is_placed_costs_nothing_where_there_is_room() -> None:
    cache = Cache(64)
    cache.use(chain_of("a", 2), 0.0, AGENT)
    cache.values.now = 1.0
    assert cache.pool.eviction_cost == 0.0
    assert BlockPool(64).eviction_cost == 0.0


def test_a_shared_prefix_counts_for_all_its_users() -> None:
    cache = Cache(400)
    now = 0.0
    prefix = chain_of("shared", 3)
    for number in range(60):
        cache.use(chain_of(f"user{number}-", 5, prefix), now)
        now += 3.0
    cache.use(chain_of("alone", 3), now - 1)
    cache.values.now = now
    evicted = cache.evict(397)
    assert not set(prefix) & set(evicted)


def test_the_next_turn_of_a_session_leaves_nothing_of_value_behind() -> None:
    """The template has dropped the thinking of the turn before, so that the chain goes on from the
    middle of the old one."""
    cache = Cache(30)
    session = Turn(session="s")
    old = chain_of("thinking", 10)
    cache.use(chain_of("other", 6), 0.0)
    cache.use(old, 5.0, session)
    cache.use(chain_of("answer", 9, old[:4]), 6.0, session)
    cache.pool.allocate(30 - 6 - 10 - 5)
    assert cache.evict(6) == list(reversed(old[4:]))


def test_another_session_may_go_on_from_the_middle_without_harm() -> None:
    cache = Cache(30)
    old = chain_of("first", 10)
    cache.use(chain_of("other", 6), 0.0)
    cache.use(old, 5.0, Turn(session="s"))
    cache.use(chain_of("branch", 9, old[:4]), 6.0, Turn(session="t"))
    cache.pool.allocate(30 - 6 - 10 - 5)
    assert set(cache.evict(6)) == set(chain_of("other", 6))


def test_a_hint_keeps_blocks_for_its_time_and_no_longer() -> None:
    cache = Cache(8)
    cache.use(chain_of("kept", 4), 0.0, Turn(keep_seconds=300))
    cache.use(chain_of("young", 4), 200.0)
    assert cache.values.num_kept == 4
    assert cache.evict(2) == [b"young3", b"young2"]
    cache.use(chain_of("young", 4), 399.0)
    assert cache.values.num_kept == 0
    assert cache.evict(2) == [b"kept3", b"kept2"]


def test_a_hint_does_not_outlive_the_blocks_that_were_given_back_early() -> None:
    cache = Cache(8)
    hinted = chain_of("hinted", 4)
    cache.use(hinted, 0.0, Turn(tenant="a", keep_seconds=300))
    hits = cache.pool.find_leading(hinted)
    cache.pool.share(hits)
    cache.pool.release(hits, is_early=True)
    cache.use(chain_of("next", 8), 1.0, Turn(tenant="b"))
    assert cache.values.num_kept == 0
    cache.use(chain_of("more", 4), 2.0, Turn(tenant="b"))
    assert cache.evict(8) == [*reversed(chain_of("next", 4)), *reversed(chain_of("more", 4))]


def test_a_hint_whose_time_is_over_is_not_hidden_by_longer_ones() -> None:
    cache = Cache(8)
    for at, (name, seconds) in enumerate({"old": 3600.0, "over": 5.0, "new": 3600.0}.items()):
        cache.use(chain_of(name, 2), float(at), Turn(keep_seconds=seconds))
    cache.use(chain_of("young", 2), 100.0)
    assert cache.evict(2) == [b"over1", b"over0"]


def test_only_the_models_own_end_tokens_make_a_kind_of_turn() -> None:
    turn = Turn(kind="tool", end_token_ids=(7, 8))
    kinds = [turn.ended(each).kind for each in (7, 8, 9, None)]
    assert kinds == ["tool/7", "tool/8", "tool", "tool"]


def test_kept_blocks_are_counted_at_most_once_a_second_and_expired_hints_are_dropped() -> None:
    notes = BlockNotes()
    notes.keep([1, 2], 10.0)
    assert notes.num_kept(0.0) == 2
    notes.keep([3], 20.0)
    assert (notes.num_kept(0.5), notes.num_kept(1.5)) == (2, 3)
    assert notes.num_kept(10.0) == 1
    assert notes.keep([1], 0.0) == 0.0


@pytest.mark.parametrize("is_move", [True, False])
def test_blocks_that_are_held_to_be_copied_do_not_count_as_returned(is_move: bool) -> None:
    times = ReturnClasses()
    cache = Cache(8, times=times)
    for number in range(100):
        cache.use(chain_of(f"{number}-", 2), number * 10.0, AGENT)
        hits = cache.pool.find_leading(chain_of(f"{number}-", 2))
        cache.values.now += 1
        cache.pool.share(hits, is_move=is_move)
        cache.pool.release(hits, turn=moved(AGENT.tenant), is_move=is_move)
    learnt = times.of(("", AGENT.kind)).hazards[bucket_of(1.0)]
    assert (learnt < PRIOR_HAZARD) is is_move


@pytest.mark.parametrize(("priority", "first"), [(3, "plain"), (-3, "hinted")])
def test_blocks_of_a_higher_priority_stay_longer(priority: int, first: str) -> None:
    cache = Cache(8)
    cache.use(chain_of("plain", 4), 0.0)
    cache.use(chain_of("hinted", 4), 0.0, Turn(priority=priority))
    cache.values.now = 5.0
    assert cache.evict(4) == list(reversed(chain_of(first, 4)))


def test_a_flood_of_one_tenant_takes_nothing_of_another_ones_share() -> None:
    cache = Cache(1000)
    now = 0.0
    for number in range(200):
        cache.use(chain_of(f"calm{number}-", 5), now, Turn(tenant="calm", keep_seconds=1))
        now += 0.1
    for number in range(3000):
        flood = Turn(tenant="flood", priority=8, keep_seconds=60)
        cache.use(chain_of(f"flood{number}-", 5), now, flood)
        now += 0.1
        assert number < 200 or cache.values.num_of("calm") == pytest.approx(500, abs=10)
    weighted = Turn(tenant="calm", weight=3.0)
    for number in range(400):
        cache.use(chain_of(f"more{number}-", 5), now, weighted)
        now += 0.1
    assert cache.values.num_of("calm") == pytest.approx(750, abs=20)


def test_the_unused_share_of_a_tenant_goes_to_others() -> None:
    cache = Cache(100)
    cache.use(chain_of("calm", 5), 0.0, Turn(tenant="calm"))
    for number in range(60):
        cache.use(chain_of(f"flood{number}-", 5), number / 10, Turn(tenant="flood"))
    assert cache.values.num_of("flood") == 95
    assert cache.values.num_of("calm") == 5


@pytest.mark.parametrize(("num_tenants", "length"), [(2, 3), (10, 3), (10, 7)])
def test_tenants_that_have_exactly_their_shares_give_up_all_their_blocks(
    num_tenants: int, length: int
) -> None:
    """Rounded, the shares of tenants of weight 0.1 are a little more than what each has."""
    cache = Cache(num_tenants * length)
    for number in range(num_tenants):
        turn = Turn(tenant=f"tenant {number}", weight=0.1)
        cache.use(chain_of(f"{number}-", length), 0.0, turn)
    assert len(cache.evict(num_tenants * length)) == num_tenants * length


def test_tenants_that_left_are_forgotten_with_their_classes() -> None:
    times = ReturnClasses()
    cache = Cache(40, times=times)
    gone = times.of(("tenant 0",))
    for number in range(50):
        turn = Turn(tenant=f"tenant {number}")
        cache.use(chain_of(f"{number}-", 4), number * 100.0, turn)
    assert cache.values.tenants == {f"tenant {number}" for number in range(39, 50)}
    assert times.of(("tenant 0",)) is not gone


def test_a_review_compares_no_more_classes_than_its_victims_pay_for() -> None:
    cache = Cache(2000)
    for number in range(2000):
        turn = Turn(tenant=f"tenant {number % 2}", kind=f"kind {number}")
        cache.use(chain_of(f"{number}-", 1), 0.0, turn)
    cache.evict(1)
    assert cache.values._victims._num_until_review >= 4 * 1900


class OrderAgainstModel(RuleBasedStateMachine):
    """Sequences of several tenants take, share, cache and give back blocks in any order."""

    NUM_BLOCKS = 24

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(self.NUM_BLOCKS + 1, RecomputeCosts(4))
        assert self.pool.values is not None
        self.values = self.pool.values
        self.holds = dict.fromkeys(range(1, self.NUM_BLOCKS + 1), 0)
        self.held: list[list[int]] = []
        self.names = count()

    @rule(num_blocks=st.integers(0, 9), num_cached=st.integers(0, 9))
    def allocate(self, num_blocks: int, num_cached: int) -> None:
        if num_blocks > self.pool.num_free:
            return
        before = {tenant: self.values.num_of(tenant) for tenant in self.values.tenants}
        blocks = self.pool.allocate(num_blocks)
        for tenant, share in self.values._rings.shares.items():
            # A tenant below its share loses none, and no other falls more than one below it.
            least = int(self.values.num_blocks * share.fraction) - 1
            assert share.num_blocks >= min(before[tenant], least)
        assert len(set(blocks)) == num_blocks
        assert all(self.holds[block] == 0 for block in blocks)
        self.holds.update(dict.fromkeys(blocks, 1))
        for block in blocks[:num_cached]:
            self.pool.cache(block, b"%d" % next(self.names))
        self.held.append(blocks)

    @precondition(lambda self: self.pool.cached_hashes())
    @rule(data=st.data())
    def hit(self, data: st.DataObject) -> None:
        hashes = data.draw(
            st.lists(st.sampled_from(sorted(self.pool.cached_hashes())), unique=True)
        )
        blocks = [block for each in hashes if (block := self.pool.find(each)) is not None]
        self.pool.share(blocks)
        for block in blocks:
            self.holds[block] += 1
        self.held.append(blocks)

    @precondition(lambda self: self.held)
    @rule(
        data=st.data(),
        is_early=st.booleans(),
        tenant=st.sampled_from("ab"),
        session=st.sampled_from(["", "s", "t"]),
        keep_seconds=st.sampled_from([0.0, 0.0, 5.0]),
    )
    def release(
        self, data: st.DataObject, is_early: bool, tenant: str, session: str, keep_seconds: float
    ) -> None:
        blocks = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        turn = Turn(tenant=tenant, session=session, keep_seconds=keep_seconds)
        self.pool.release(blocks, is_early=is_early, turn=turn)
        for block in blocks:
            self.holds[block] -= 1

    @rule(seconds=st.floats(0, 1000))
    def wait(self, seconds: float) -> None:
        self.values.now += seconds

    @invariant()
    def counts_balance(self) -> None:
        assert self.pool.ref_counts[1:] == list(self.holds.values())
        num_free = sum(num_holds == 0 for num_holds in self.holds.values())
        assert self.pool.num_free == num_free
        assert self.values.num_of("a") + self.values.num_of("b") == self.values.num_blocks
        assert self.values.num_blocks <= num_free

    def teardown(self) -> None:
        """Every free block can be had."""
        blocks = self.pool.allocate(self.pool.num_free)
        assert len(set(blocks)) == len(blocks)
        assert self.values.num_blocks == 0


OrderAgainstModel.TestCase.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None
)
TestOrderAgainstModel = OrderAgainstModel.TestCase
