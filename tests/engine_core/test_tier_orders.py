"""What each order of eviction of a tier promises, whatever it evicts first."""

from __future__ import annotations

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headwater.engine_core.kv.value.recompute import RecomputeCosts
from headwater.engine_core.kv.value.tier_order import GivenBack, RecencyOrder, TierOrder
from headwater.engine_core.kv.value.tier_values import TierValues
from headwater.engine_core.kv.value.turn import Turn

NUM_BLOCKS = 16
NAMES = st.sampled_from("abcd")


def chain_of(name: str, num_blocks: int) -> list[bytes]:
    return [f"{name}{idx:02}".encode() for idx in range(num_blocks)]


class RecencyAgainstModel(RuleBasedStateMachine):
    """Chains are saved, held, lost and evicted in any order: what is held is never evicted, and
    what is not held can be."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.order = self.new()
        self.blocks = set[bytes]()
        self.holds: list[list[bytes]] = []

    def new(self) -> TierOrder:
        return RecencyOrder()

    @property
    def held(self) -> Counter[bytes]:
        return Counter(each for hashes in self.holds for each in hashes)

    @rule(
        name=NAMES,
        num_blocks=st.integers(1, 6),
        session=st.sampled_from(["", "s"]),
        is_move=st.booleans(),
    )
    def save(self, name: str, num_blocks: int, session: str, is_move: bool) -> None:
        hashes = chain_of(name, num_blocks)
        known = [each for each in hashes if each in self.blocks]
        self.order.hold(known, is_move=is_move)
        room = NUM_BLOCKS - len(self.blocks)
        fresh = [each for each in hashes if each not in self.blocks][:room]
        self.order.fill(fresh, [int(each[1:]) for each in fresh])
        self.blocks.update(fresh)
        given = GivenBack(Turn(tenant=name, session=session), is_move=is_move)
        self.order.let_go([each for each in hashes if each in self.blocks], given)

    @rule(name=NAMES, is_move=st.booleans())
    def hold(self, name: str, is_move: bool) -> None:
        hashes = [each for each in chain_of(name, 6) if each in self.blocks]
        self.order.hold(hashes, is_move=is_move)
        self.holds.append(hashes)

    @precondition(lambda self: self.holds)
    @rule(data=st.data(), is_loaded=st.booleans())
    def let_go(self, data: st.DataObject, is_loaded: bool) -> None:
        hashes = self.holds.pop(data.draw(st.integers(0, len(self.holds) - 1)))
        self.order.let_go(hashes)
        if is_loaded:
            self.order.touch(hashes)

    @rule(name=NAMES, index=st.integers(0, 5))
    def lose(self, name: str, index: int) -> None:
        lost = chain_of(name, index + 1)[-1]
        self.order.drop([lost])
        self.blocks.discard(lost)

    @precondition(lambda self: len(self.blocks) < NUM_BLOCKS)
    @rule(name=NAMES, index=st.integers(0, 5))
    def find(self, name: str, index: int) -> None:
        *before, found = chain_of(name, index + 1)
        if found not in self.blocks and found not in self.held:
            self.order.add_oldest(found, before[-1] if before else b"")
            self.blocks.add(found)

    @rule(count=st.integers(1, 4))
    def take(self, count: int) -> None:
        evictable = self.blocks - self.held.keys()
        taken = self.order.take(count)
        assert len(set(taken)) == len(taken) == min(count, len(evictable))
        assert evictable.issuperset(taken)
        self.blocks.difference_update(taken)

    @rule(seconds=st.floats(0, 1000))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def at_most_as_many_as_there_is_room_for(self) -> None:
        assert len(self.blocks) <= NUM_BLOCKS

    def teardown(self) -> None:
        """With nothing held, every block can be evicted, and as many can be added."""
        for hashes in self.holds:
            self.order.let_go(hashes)
        assert set(self.order.take(NUM_BLOCKS)) == self.blocks
        last = chain_of("z", NUM_BLOCKS)
        self.order.fill(last, range(NUM_BLOCKS))
        self.order.let_go(last, GivenBack())
        assert self.order.take(NUM_BLOCKS + 1) == last[::-1]


class ValuesAgainstModel(RecencyAgainstModel):
    def new(self) -> TierOrder:
        return TierValues(NUM_BLOCKS, RecomputeCosts(4.0), lambda: self.now)


SETTINGS = settings(max_examples=30, stateful_step_count=30, deadline=None)
RecencyAgainstModel.TestCase.settings = SETTINGS
ValuesAgainstModel.TestCase.settings = SETTINGS
TestRecency = RecencyAgainstModel.TestCase
TestValues = ValuesAgainstModel.TestCase
