from __future__ import annotations

import random
import time
from hashlib import blake2b

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from headwater.proto import events_pb2
from headwater.services.index.kv_index import KvIndex, Verdict


def block(number: int) -> bytes:
    return (number * 0x9E3779B97F4A7C15 % 2**64).to_bytes(8, "little") * 2


def chain(*numbers: int) -> list[bytes]:
    return [block(number) for number in numbers]


def path(numbers: list[int]) -> list[bytes]:
    """As prompts are hashed: each block names all before it."""
    return [
        blake2b(bytes(numbers[: end + 1]), digest_size=16).digest() for end in range(len(numbers))
    ]


class Engine:
    """What an engine would say: numbers its batches and sums its cache."""

    def __init__(self, replica_id: str, epoch: int = 1) -> None:
        self.incarnation = events_pb2.Incarnation(replica_id=replica_id, epoch=epoch)
        self.seq = 0
        self.cached = set[bytes]()

    def says(
        self,
        stored: list[bytes] | None = None,
        removed: list[bytes] | None = None,
        *,
        cleared: bool = False,
    ) -> events_pb2.KvEventBatch:
        self.seq += 1
        self.cached = (set() if cleared else self.cached - set(removed or [])) | set(stored or [])
        xor = 0
        for each in self.cached:
            xor ^= int.from_bytes(each[:8], "little")
        return events_pb2.KvEventBatch(
            incarnation=self.incarnation,
            seq=self.seq,
            stored=[events_pb2.StoredBlocks(block_hashes=stored)] if stored else [],
            removed=removed or [],
            cleared=cleared,
            index_count=len(self.cached),
            index_xor=xor,
        )


def begin(index: KvIndex, *engines: Engine) -> None:
    for engine in engines:
        column = index.open(engine.incarnation.replica_id, engine.incarnation.epoch)
        index.fill(column, engine.cached)
        index.publish(column, engine.seq)


def test_a_prefix_counts_up_to_its_first_missing_block() -> None:
    index = KvIndex()
    a = Engine("a")
    b = Engine("b")
    begin(index, a, b)
    assert index.apply(a.says(chain(1, 2, 3))) is Verdict.APPLIED
    assert index.apply(b.says(chain(1, 2, 3, 4, 5))) is Verdict.APPLIED
    assert index.apply(b.says(removed=chain(4))) is Verdict.APPLIED
    assert index.lookup(chain(1, 2, 3, 4, 5)) == {"a": 3, "b": 3}
    assert index.lookup(chain(1, 2)) == {"a": 2, "b": 2}
    assert index.lookup(chain(2, 3)) == {"a": 2, "b": 2}
    assert index.lookup(chain(9, 1)) == {}
    assert index.lookup([]) == {}


def test_a_gap_is_noticed_and_a_snapshot_mends_it() -> None:
    index = KvIndex()
    a = Engine("a")
    begin(index, a)
    index.apply(a.says(chain(1)))
    a.says(chain(2))
    assert index.apply(a.says(chain(3))) is Verdict.GAP
    assert not index.column("a").is_synced
    begin(index, a)
    assert index.column("a").is_synced
    assert index.lookup(chain(1, 2, 3)) == {"a": 3}
    assert index.apply(a.says(removed=chain(1))) is Verdict.APPLIED


def test_what_is_known_already_or_comes_from_another_incarnation_changes_nothing() -> None:
    index = KvIndex()
    a = Engine("a", 1)
    reborn = Engine("a", 2)
    begin(index, a)
    first = a.says(chain(1))
    index.apply(first)
    assert index.apply(first) is Verdict.OLD
    assert index.apply(reborn.says(chain(7))) is Verdict.OLD
    assert index.lookup(chain(7)) == {}


def test_a_checksum_that_differs_is_a_mismatch() -> None:
    index = KvIndex()
    a = Engine("a")
    begin(index, a)
    batch = a.says(chain(1, 2))
    del batch.stored[0].block_hashes[1]
    assert index.apply(batch) is Verdict.MISMATCH


def test_a_restarted_replica_has_nothing_of_its_old_column_and_the_number_is_used_again() -> None:
    index = KvIndex()
    a = Engine("a", 1)
    begin(index, a)
    index.apply(a.says(chain(*range(2000))))
    begin(index, Engine("a", 2))
    assert index.lookup(chain(0, 1)) == {}
    index.sweep(10_000)
    assert len(index) == 0
    assert index.open("b", 1).number == 0


def test_what_a_request_will_store_is_believed_for_a_while() -> None:
    now = 0.0
    index = KvIndex(clock=lambda: now)
    a = Engine("a")
    begin(index, a)
    index.expect("a", chain(1, 2, 3), 2.0)
    assert index.lookup(chain(1, 2, 3)) == {"a": 3}
    index.apply(a.says(chain(1)))
    now = 1.0
    index.expect("a", chain(1, 2), 2.0)
    now = 2.5
    assert index.lookup(chain(1, 2, 3)) == {"a": 2}
    now = 3.5
    assert index.lookup(chain(1, 2, 3)) == {"a": 1}


def test_more_that_is_expected_than_is_looked_up_is_not_kept_for_ever() -> None:
    now = 0.0
    index = KvIndex(clock=lambda: now)
    a = Engine("a")
    begin(index, a)
    for second in range(100):
        now = float(second)
        index.lookup(chain(second))
        for number in range(5):
            index.expect("a", chain(1000 * second + number), 2.0)
    assert sum(index.lookup(chain(1000 * second)) != {} for second in range(100)) <= 3


def test_expected_blocks_survive_a_resync_and_end_with_the_incarnation() -> None:
    now = 0.0
    index = KvIndex(clock=lambda: now)
    a = Engine("a")
    begin(index, a)
    index.expect("a", chain(1, 2), 2.0)
    begin(index, a)
    assert index.lookup(chain(1, 2)) == {"a": 2}
    now = 3.0
    assert index.lookup(chain(1, 2)) == {}
    index.sweep(100)
    assert len(index) == 0
    index.expect("a", chain(1, 2), 2.0)
    begin(index, Engine("a", 2))
    assert index.lookup(chain(1, 2)) == {}


def test_the_index_is_capped_and_forgets_the_least_recently_used_chain_from_its_tail() -> None:
    index = KvIndex(max_blocks=10)
    a = Engine("a")
    begin(index, a)
    index.apply(a.says(chain(*range(6))))
    index.apply(a.says(chain(*range(100, 104))))
    index.lookup(chain(*range(6)))
    index.apply(a.says(chain(200, 201, 202)))
    assert len(index) == 10
    assert index.lookup(chain(*range(6))) == {"a": 6}
    assert index.lookup(chain(*range(100, 104))) == {"a": 1}
    assert index.apply(a.says(removed=chain(103))) is Verdict.APPLIED


class AgainstPlainSets(RuleBasedStateMachine):
    """The index says what a dict of sets says."""

    replicas = st.sampled_from("abc")
    numbers = st.lists(st.integers(0, 2), min_size=1, max_size=6)

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.index = KvIndex(clock=lambda: self.now)
        self.epoch = 1
        self.engines = {name: Engine(name) for name in "abc"}
        self.expected: dict[str, dict[bytes, float]] = {name: {} for name in "abc"}
        begin(self.index, *self.engines.values())

    @rule(name=replicas, numbers=numbers)
    def stores(self, name: str, numbers: list[int]) -> None:
        self.index.apply(self.engines[name].says(path(numbers)))

    @rule(name=replicas, numbers=numbers, start=st.integers(0, 5))
    def removes(self, name: str, numbers: list[int], start: int) -> None:
        gone = [each for each in path(numbers)[start:] if each in self.engines[name].cached]
        self.index.apply(self.engines[name].says(removed=gone))

    @rule(name=replicas)
    def clears(self, name: str) -> None:
        self.expected[name] = {}
        self.index.apply(self.engines[name].says(cleared=True))

    @rule(name=replicas)
    def restarts(self, name: str) -> None:
        self.epoch += 1
        self.engines[name] = Engine(name, self.epoch)
        self.expected[name] = {}
        begin(self.index, self.engines[name])

    @rule(name=replicas)
    def resyncs(self, name: str) -> None:
        begin(self.index, self.engines[name])

    @rule(name=replicas, numbers=numbers, start=st.integers(0, 5))
    def is_expected_to_store(self, name: str, numbers: list[int], start: int) -> None:
        self.index.expect(name, path(numbers), 5.0, start)
        for each in path(numbers)[start:]:
            self.expected[name][each] = self.now + 5.0

    @rule(seconds=st.floats(0.5, 6))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule(num_blocks=st.integers(0, 5))
    def sweeps(self, num_blocks: int) -> None:
        self.index.sweep(num_blocks)

    def lets_expire(self) -> None:
        """Each look-up takes back a little."""
        for _ in range(50):
            self.index.lookup([])

    def holds(self, name: str, each: bytes) -> bool:
        return each in self.engines[name].cached or self.expected[name].get(each, 0.0) > self.now

    @rule(numbers=numbers)
    def looks_up(self, numbers: list[int]) -> None:
        self.lets_expire()
        wanted = path(numbers)
        plain = {}
        for name in "abc":
            length = next(
                (i for i, each in enumerate(wanted) if not self.holds(name, each)), len(wanted)
            )
            if length:
                plain[name] = length
        assert self.index.lookup(wanted) == plain

    @invariant()
    def sums_agree(self) -> None:
        for name, engine in self.engines.items():
            assert self.index.column(name).blocks == engine.cached

    def teardown(self) -> None:
        for name in "abc":
            self.index.forget(name)
        self.now += 10
        self.lets_expire()
        self.index.sweep(10_000)
        assert len(self.index) == 0
        assert self.index.open("new", 1).number == 0
        assert not self.index._expectations


TestAgainstPlainSets = AgainstPlainSets.TestCase
TestAgainstPlainSets.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_a_lookup_of_512_blocks_over_32_replicas_takes_microseconds() -> None:
    index = KvIndex()
    rng = random.Random(0)
    wanted = chain(*range(512))
    for number in range(32):
        engine = Engine(f"replica-{number}")
        begin(index, engine)
        index.apply(engine.says(wanted[: rng.randrange(1, 512)]))
    index.apply(engine.says(wanted))
    took = []
    for _ in range(20):
        started = time.thread_time()
        index.lookup(wanted)
        took.append(time.thread_time() - started)
    assert min(took) < 0.001
