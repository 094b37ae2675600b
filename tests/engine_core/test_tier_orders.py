"""What each order of eviction of a tier promises, whatever it evicts first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headwater.bench.agent_sessions import SHORT, draw_sessions, scaled
from headwater.bench.cache_replay import Prefill, full_blocks, replay, turn_of
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


class Tier:
    """A tier of which each prompt is read and then saved, as a cache of a replayed trace."""

    def __init__(self, num_blocks: int, new: Callable[[Callable[[], float]], TierOrder]) -> None:
        self._num_blocks = num_blocks
        self._now = 0.0
        self._order = new(lambda: self._now)
        self._held = set[bytes]()

    def serve(self, hash_ids: Sequence[int], now: float, turn: Turn) -> int:
        self._now = now
        hashes = [hash_id.to_bytes(16) for hash_id in hash_ids]
        known = [each for each in hashes if each in self._held]
        num_hits = next(
            (at for at, each in enumerate(hashes) if each not in self._held), len(hashes)
        )
        self._order.hold(known, is_move=False)
        fresh = [at for at, each in enumerate(hashes) if each not in self._held]
        free = self._num_blocks - len(self._held)
        self._held.difference_update(self._order.take(max(0, len(fresh) - free)))
        fresh = fresh[: self._num_blocks - len(self._held)]
        saved = [hashes[at] for at in fresh]
        self._order.fill(saved, fresh)
        self._held.update(saved)
        offered = [each for each in hashes if each in self._held]
        self._order.let_go(offered, GivenBack(turn))
        return num_hits


def test_by_value_a_tier_has_more_of_what_agents_ask_for() -> None:
    records = draw_sessions(scaled(SHORT, 0.12), seed=0)
    num_blocks = round(0.15 * len({each for record in records for each in full_blocks(record)}))
    prefill = Prefill()
    recent, valued = (
        replay(records, Tier(num_blocks, new), prefill, turn_of)
        for new in (
            lambda clock: RecencyOrder(),
            lambda clock: TierValues(num_blocks, prefill.costs, clock),
        )
    )
    assert valued.num_hit_tokens > 1.2 * recent.num_hit_tokens
