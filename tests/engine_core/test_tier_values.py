"""Host memory that evicts by value: which copies go first, and what never goes."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headwater.engine_core.executor import SwapPlan
from headwater.engine_core.kv.block_source import Owner
from headwater.engine_core.kv.host_blocks import HostBlocks
from headwater.engine_core.kv.value.recompute import RecomputeCosts
from headwater.engine_core.kv.value.tier_order import GivenBack
from headwater.engine_core.kv.value.tier_values import TierValues
from headwater.engine_core.kv.value.turn import Turn

OWNER = Owner(bytes(16))


class Swapper:
    """Copies are made at once."""

    direct_copies = None
    seconds_per_block = 0.0

    def __init__(self, num_slots: int) -> None:
        self.num_saved = self.num_loaded = 0
        self.slots = np.zeros((num_slots, 1), np.uint8)

    def swap(self, plan: SwapPlan) -> None:
        self.num_saved += plan.out_blocks.size
        self.num_loaded += plan.in_blocks.size


class Host:
    """Host memory with so many slots, on a clock of its own."""

    def __init__(self, num_slots: int) -> None:
        self.now = 0.0
        values = TierValues(num_slots, RecomputeCosts(1e9), lambda: self.now)
        self.blocks = HostBlocks(Swapper(num_slots), num_slots, values)
        self.lost: list[bytes] = []
        self.blocks.connect(self.lost.extend, lambda parent, block_hash: None)

    def save(self, name: str, num_blocks: int, turn: Turn = Turn()) -> list[bytes]:  # noqa: B008
        hashes = chain_of(name, num_blocks)
        self.blocks.save(hashes, range(num_blocks), hashes, OWNER, GivenBack(turn))
        self.blocks.launch()
        return hashes


def chain_of(name: str, num_blocks: int) -> list[bytes]:
    return [f"{name}{idx}".encode() for idx in range(num_blocks)]


def test_without_knowledge_the_last_block_of_the_oldest_chain_goes_first() -> None:
    host = Host(6)
    for at, name in enumerate("abc"):
        host.now = at * 10.0
        host.save(name, 2)
    host.now = 40.0
    host.save("d", 3)
    assert host.lost == [b"a1", b"a0", b"b1"]


def test_a_hint_keeps_copies_that_lru_would_evict() -> None:
    host = Host(6)
    host.save("kept", 2, Turn(keep_seconds=300.0))
    host.now = 100.0
    host.save("young", 4)
    host.now = 101.0
    host.save("new", 2)
    assert host.lost == [b"young3", b"young2"]


def test_a_flood_of_one_tenant_takes_nothing_of_another_ones_share() -> None:
    host = Host(20)
    host.save("calm", 8, Turn(tenant="calm"))
    for number in range(50):
        host.now += 1.0
        host.save(f"flood{number}-", 5, Turn(tenant="flood", priority=8, keep_seconds=60.0))
    assert host.blocks.find(chain_of("calm", 8)) == 8


def test_the_next_turn_of_a_session_leaves_nothing_of_value_behind() -> None:
    host = Host(12)
    host.save("other", 4)
    host.now = 5.0
    old = host.save("old", 6, Turn(session="s"))
    host.now = 6.0
    went_on = [*old[:2], b"new0", b"new1"]
    host.blocks.save(went_on, range(4), went_on, OWNER, GivenBack(Turn(session="s")))
    host.now = 7.0
    host.save("next", 4)
    assert host.lost == [b"old5", b"old4", b"old3", b"old2"]


class HostAgainstModel(RuleBasedStateMachine):
    """Chains are saved, read and lent in any order: what is read is never lost, and what is said to
    be held is held."""

    NUM_SLOTS = 12

    def __init__(self) -> None:
        super().__init__()
        self.host = Host(self.NUM_SLOTS)
        self.reading = Counter[bytes]()
        self.leases: list[list[bytes]] = []
        self.loads = 0

    @rule(
        name=st.sampled_from("abcd"),
        num_blocks=st.integers(1, 8),
        tenant=st.sampled_from("xy"),
        session=st.sampled_from(["", "s"]),
        start=st.integers(0, 3),
    )
    def save(self, name: str, num_blocks: int, tenant: str, session: str, start: int) -> None:
        hashes = chain_of(name, start + num_blocks)[start:]
        given = GivenBack(Turn(tenant=tenant, session=session), start)
        self.host.blocks.save(hashes, range(num_blocks), hashes, OWNER, given)
        self.host.blocks.launch()

    @rule(name=st.sampled_from("abcd"), start=st.integers(0, 3))
    def load(self, name: str, start: int) -> None:
        hashes = chain_of(name, 12)[start:]
        if num_found := self.host.blocks.find(hashes):
            self.host.blocks.load(hashes[:num_found], range(num_found))
            self.host.blocks.launch()
            self.reading.update(hashes[:num_found])
            self.loads += 1

    @precondition(lambda self: self.loads)
    @rule()
    def poll(self) -> None:
        for end in self.host.blocks.poll():
            self.reading.subtract(end.ticket.hashes)
            self.loads -= 1

    @rule(name=st.sampled_from("abcd"))
    def lend(self, name: str) -> None:
        hashes = chain_of(name, 12)
        held = hashes[: len(self.host.blocks.hold(hashes))]
        self.reading.update(held)
        self.leases.append(held)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def end_lease(self, data: st.DataObject) -> None:
        held = self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1)))
        self.host.blocks.let_go(held)
        self.reading.subtract(held)

    @rule(seconds=st.floats(0, 1000))
    def wait(self, seconds: float) -> None:
        self.host.now += seconds

    @invariant()
    def what_is_read_is_held(self) -> None:
        held = set(self.host.blocks.held)
        assert {each for each, count in self.reading.items() if count} <= held
        assert len(held) <= self.NUM_SLOTS

    def teardown(self) -> None:
        """With nothing read, every slot can be had."""
        for held in self.leases:
            self.host.blocks.let_go(held)
        self.host.blocks.poll()
        self.host.save("last", self.NUM_SLOTS)
        assert set(self.host.blocks.held) == set(chain_of("last", self.NUM_SLOTS))


HostAgainstModel.TestCase.settings = settings(
    max_examples=30, stateful_step_count=30, deadline=None
)
TestHostAgainstModel = HostAgainstModel.TestCase
