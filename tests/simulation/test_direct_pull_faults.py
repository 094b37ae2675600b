"""Faults planted where engines copy blocks out of each other's KV caches: each is caught by the
simulation of peers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import count

import pytest

from headwater.engine_core.executor import UInt8Array
from headwater.engine_core.executors.model.shared_kv import SharedCopies, SharedCopy
from headwater.engine_core.kv import direct_pulls
from headwater.engine_core.kv.block_leases import BlockLeases
from headwater.engine_core.kv.direct_leases import DirectLeases, _Lease
from headwater.engine_core.kv.direct_pulls import DirectEnd, DirectPulls, _Pull
from headwater.engine_core.kv.peer_link import Claim, Pulled
from tests.simulation.peer_faults import run_seed
from tests.simulation.seeds import breaks

MOST_SEEDS = 1200
"""Within which a planted fault has to show; half of the seeds copy directly."""


def test_blocks_are_copied_directly() -> None:
    outcomes = [run_seed(seed) for seed in range(10)]
    assert sum(each.num_direct for each in outcomes) > 0


def stranded_lease(patch: pytest.MonkeyPatch) -> None:
    """A lease whose engine is gone keeps its blocks."""
    patch.setattr(DirectLeases, "end", lambda leases, number, num_copied: None)


def double_free(patch: pytest.MonkeyPatch) -> None:
    let_go = DirectLeases._let_go

    def twice(leases: DirectLeases, lease: _Lease) -> None:
        let_go(leases, lease)
        leases._pool.release(lease.blocks)

    patch.setattr(DirectLeases, "_let_go", twice)


def lost_wake_up(patch: pytest.MonkeyPatch) -> None:
    """Who waits for blocks that a lease held hears nothing of its end."""
    advance = BlockLeases.advance
    patch.setattr(BlockLeases, "advance", lambda leases, _: advance(leases, 2**31) and False)


def unpin(patch: pytest.MonkeyPatch) -> None:
    """Blocks may be taken for something else while they are copied."""
    pin = DirectLeases._pin

    def pin_and_let_go(leases: DirectLeases, lease: _Lease) -> bool:
        is_answered = pin(leases, lease)
        leases._pool.release(lease.blocks)
        return is_answered

    patch.setattr(DirectLeases, "_pin", pin_and_let_go)
    patch.setattr(DirectLeases, "_let_go", lambda leases, lease: None)
    patch.setattr(DirectLeases, "pinned_blocks", property(lambda leases: []))
    copy_slowly(patch)


def copy_slowly(patch: pytest.MonkeyPatch) -> None:
    copy_block = SharedCopies._copy_block
    turns = count()

    def copy_late(
        copies: SharedCopies, copy: SharedCopy, theirs: UInt8Array, source: int, target: int
    ) -> None:
        # Others have time to take the blocks.
        if next(turns) % 8:
            copies._lane.submit(partial(copies._copy_block, copy, theirs, source, target))
        else:
            copy_block(copies, copy, theirs, source, target)

    patch.setattr(SharedCopies, "_copy_block", copy_late)


def unpinned_and_unchecked(patch: pytest.MonkeyPatch) -> None:
    """What the owner says after the copy does not count either. Either alone does no harm."""
    unpin(patch)
    patch.setattr(Claim, "num_common", lambda before, after: len(before.hashes))


def claimed_before_the_copy(patch: pytest.MonkeyPatch) -> None:
    """The owner is told that a copy has ended while it goes on, and may let go of the blocks."""
    is_done = SharedCopy.is_done
    assert isinstance(is_done, property)
    poll = DirectPulls.poll

    def poll_early(pulls: DirectPulls) -> list[DirectEnd]:
        for pull in pulls._pulls.values():
            if pull.copy is not None and not pull.is_reported and pull.answer is None:
                pull.is_reported = True
                pulls._link.send(direct_pulls.PullCopied(pull=pull.number))
        return poll(pulls)

    patch.setattr(DirectPulls, "poll", poll_early)


def given_up_while_copied(patch: pytest.MonkeyPatch) -> None:
    """A load that was given up ends while its blocks are still written to."""
    has_ended = property(lambda pull: pull.answer is not None)
    patch.setattr(_Pull, "has_ended", has_ended)
    copy_slowly(patch)


def stale_hash(patch: pytest.MonkeyPatch) -> None:
    """Blocks are used that the owner names otherwise than they were asked for."""
    patch.setattr(DirectPulls, "_num_claimed", lambda pulls, pull, claim: len(claim.hashes))


def lost_answer(patch: pytest.MonkeyPatch) -> None:
    """A pull that brought nothing is not noticed."""
    pulled = DirectPulls.pulled

    def only_good(pulls: DirectPulls, answer: Pulled) -> None:
        if answer.after.hashes:
            pulled(pulls, answer)

    patch.setattr(DirectPulls, "pulled", only_good)


def forgotten_lease(patch: pytest.MonkeyPatch) -> None:
    """An engine that needs no second claim does not say that it has copied the blocks."""
    end_copy = DirectPulls._end_copy

    def end_quietly(pulls: DirectPulls, pull: _Pull) -> None:
        if pull.check is None:
            end_copy(pulls, pull)
        else:
            pull.num_unchanged = pull.check.view.num_unchanged(pull.check.found)

    patch.setattr(DirectPulls, "_end_copy", end_quietly)


PLANTED = [
    stranded_lease,
    double_free,
    lost_wake_up,
    pytest.param(unpinned_and_unchecked, marks=pytest.mark.long),
    pytest.param(claimed_before_the_copy, marks=pytest.mark.long),
    pytest.param(given_up_while_copied, marks=pytest.mark.long),
    stale_hash,
    lost_answer,
    forgotten_lease,
]
SHOWN_BY: dict[Callable[[pytest.MonkeyPatch], None], int] = {
    stranded_lease: 4,
    double_free: 4,
    lost_wake_up: 79,
    given_up_while_copied: 88,
    stale_hash: 58,
    lost_answer: 2,
    forgotten_lease: 16,
}
"""Seeds that are tried first: those that showed a fault when it was planted last. Another one may
by now."""


@pytest.mark.parametrize("plant", PLANTED)
def test_a_planted_fault_is_caught(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    assert any(map(partial(breaks, run_seed), [SHOWN_BY.get(plant, 0), *range(MOST_SEEDS)]))


@pytest.mark.parametrize("num_seeds", [40, pytest.param(200, marks=pytest.mark.long)])
def test_blocks_that_are_overwritten_while_they_are_copied_are_not_used(
    num_seeds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    unpin(monkeypatch)
    assert not any(map(partial(breaks, run_seed), range(num_seeds)))
