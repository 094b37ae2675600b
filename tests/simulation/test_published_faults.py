"""Engines that copy what others publish of their KV caches: in random schedules, and with faults
planted, each of which is caught."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from headwater.engine_core.kv import published_blocks
from headwater.engine_core.kv.block_pool import BlockPool
from headwater.engine_core.kv.published_blocks import BlocksView, Found, PublishedBlocks
from tests.simulation import peer_faults, published_faults
from tests.simulation.published_faults import SlowMemory

MOST_SEEDS = 500
"""Within which a planted fault has to show."""


def check_seeds(seeds: range) -> None:
    runs = [published_faults.run_seed(seed) for seed in seeds]
    assert sum(each.num_changed for each in runs) > 0
    assert sum(each.num_copied - each.num_changed for each in runs) > 0


def test_whatever_the_owner_does_meanwhile_a_block_that_counts_is_the_one_that_was_looked_for() -> (
    None
):
    check_seeds(range(1000))


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_a_block_that_counts_is_the_one_looked_for_in_fifty_thousand_seeds() -> None:
    check_seeds(range(1000, 51_000))


def test_copies_of_engines_begin_before_a_lease_is_there_and_end_without_a_second_claim() -> None:
    outcomes = [peer_faults.run_seed(seed) for seed in range(75, 90)]
    assert sum(each.num_ahead for each in outcomes) > 0
    assert sum(each.num_compared for each in outcomes) > 0


def stale_generation(patch: pytest.MonkeyPatch) -> None:
    """Others learn only when a step has ended that blocks were handed out."""
    publish = BlockPool.publish
    advance = PublishedBlocks.advance
    shared: dict[BlockPool, memoryview[int]] = {}

    def publish_late(pool: BlockPool, generations: memoryview[int]) -> None:
        publish(pool, generations)
        shared[pool] = generations
        pool.generations = list(generations)

    def advance_late(blocks: PublishedBlocks, retired_step: int) -> None:
        if retired_step == blocks._steps.youngest or not blocks._steps.youngest:
            for block, generation in enumerate(blocks._pool.generations):
                shared[blocks._pool][block] = generation
        advance(blocks, retired_step)

    patch.setattr(BlockPool, "publish", publish_late)
    patch.setattr(PublishedBlocks, "advance", advance_late)


def wrapped_generation(patch: pytest.MonkeyPatch) -> None:
    """Generations begin again after two."""

    class Wrapped:
        def __init__(self, counts: memoryview[int]) -> None:
            self._counts = counts

        def __len__(self) -> int:
            return len(self._counts)

        def __getitem__(self, block: int) -> int:
            return self._counts[block]

        def __setitem__(self, block: int, generation: int) -> None:
            self._counts[block] = 1 + (generation - 1) % 2

    publish = BlockPool.publish

    def publish_wrapped(pool: BlockPool, generations: memoryview[int]) -> None:
        publish(pool, generations)
        pool.generations = Wrapped(generations)  # type: ignore[assignment]

    patch.setattr(BlockPool, "publish", publish_wrapped)


def compared_before_the_copy(patch: pytest.MonkeyPatch) -> None:
    """What was torn by the owner while it was copied counts, also where the lease had ended."""
    patch.setattr(BlocksView, "num_unchanged", lambda view, found: len(found.blocks))


def hash_before_its_stamp(patch: pytest.MonkeyPatch) -> None:
    """A hash counts as one of the generation that is read behind it."""
    find = BlocksView.find

    def find_in_wrong_order(view: BlocksView, hashes: Sequence[bytes]) -> Found:
        words = view._read(view._hashes)
        stamps = view._read(view._stamps)
        columns = iter([stamps, words])
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(type(view), "_read", lambda _, column: next(columns))
            return find(view, hashes)

    patch.setattr(BlocksView, "find", find_in_wrong_order)


def stamp_before_its_hash(patch: pytest.MonkeyPatch) -> None:
    """The owner says of which generation a hash is before it has written the hash."""
    write = SlowMemory.__setitem__

    def write_last_first(
        memory: SlowMemory, at: int | slice[int, int, None], value: int | bytes
    ) -> None:
        before = list(memory._writes)
        memory._writes.clear()
        write(memory, at, value)
        memory._writes.extend(before)

    patch.setattr(SlowMemory, "__setitem__", write_last_first)


def published_before_it_is_computed(patch: pytest.MonkeyPatch) -> None:
    advance = PublishedBlocks.advance
    patch.setattr(PublishedBlocks, "advance", lambda blocks, retired_step: advance(blocks, 2**31))


def another_incarnation(patch: pytest.MonkeyPatch) -> None:
    """Memory counts as the engine's that its name leads to."""
    patch.setattr(published_blocks, "_is_of", lambda mapped, token: True)


PLANTED = [
    stale_generation,
    wrapped_generation,
    compared_before_the_copy,
    hash_before_its_stamp,
    stamp_before_its_hash,
    published_before_it_is_computed,
    another_incarnation,
]


@pytest.mark.parametrize("plant", PLANTED)
def test_a_planted_fault_is_caught(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        check_seeds(range(MOST_SEEDS))
