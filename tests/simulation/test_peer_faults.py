from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import count

import pytest

from headwater.engine_core.kv import block_record
from headwater.engine_core.kv.block_leases import BlockLeases, _Lease, _RecordWriter
from headwater.engine_core.kv.block_loads import BlockLoads, SettledLoad
from headwater.engine_core.kv.block_record import BlockSeal, Buffer
from headwater.engine_core.kv.block_source import LoadEnd, Owner, Ticket
from headwater.engine_core.kv.early_pull import EarlyPull
from headwater.engine_core.kv.peer_blocks import PeerBlocks
from headwater.engine_core.kv.peer_link import Claim, Pulled
from headwater.engine_core.kv.staged_loads import StagedLoads
from headwater.engine_core.page_groups import is_block_hash
from headwater.engine_core.scheduling.blocks import prefetches
from headwater.engine_core.scheduling.blocks.prefetches import Prefetches
from headwater.engine_core.scheduling.seating.waiting_queue import WaitingQueue
from headwater.engine_core.scheduling.table.request_state import RequestState
from tests.long_values import long_but
from tests.simulation.peer_faults import BRIEF, WHOLE, Pace, run_seed
from tests.simulation.peer_twins import FAULTS
from tests.simulation.seeds import breaks
from tests.simulation.tier_faults import ONE_PAGE, PAGES

SEEDS = (range(100), range(100, 500), *(range(i, i + 500) for i in range(500, 2000, 500)))
"""`make test` runs the first ones."""
MOST_SEEDS = 600
"""Number of seeds within which a planted fault has to show."""


def check_seeds(seeds: range, pace: Pace = WHOLE, pages: str = "") -> Counter[str]:
    """What the seeds met with, added up. `pages`: a name of `PAGES`."""
    seen = Counter[str]()
    for seed in seeds:
        try:
            outcome = run_seed(seed, pace, PAGES.get(pages, ONE_PAGE))
        except AssertionError as broken:
            command = (
                f"python -m tests.simulation.peer_faults --first {seed}"
                f"{' --brief' if pace == BRIEF else ''}{' --pages ' + pages if pages else ''}"
            )
            pytest.fail(f"`{command}` repeats it: {broken}")
        seen.update(outcome.faults)
        seen["pulled"] += outcome.num_pulled_tokens
        seen["prefetched"] += outcome.num_prefetched_tokens
        seen["lent"] += outcome.num_lent_tokens
        seen["lent from tiers"] += outcome.num_lent_from_tiers
        seen["direct"] += outcome.num_direct
        seen["ahead"] += outcome.num_ahead
        seen["compared"] += outcome.num_compared
        seen["discarded"] += outcome.num_discarded
        seen["preempted"] += outcome.num_preemptions
        seen["deaths"] += outcome.num_deaths
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("seeds", long_but(SEEDS, SEEDS[0]), ids=str)
def test_whatever_befalls_a_copy_answers_are_exact_and_blocks_are_conserved(seeds: range) -> None:
    seen = check_seeds(seeds, BRIEF)
    met = (
        "pulled",
        "prefetched",
        "lent",
        "lent from tiers",
        "direct",
        "ahead",
        "compared",
        "discarded",
        "preempted",
        "deaths",
    )
    assert min(seen[name] for name in (*FAULTS, *met)) > 0


@pytest.mark.parametrize("pages", PAGES)
def test_pages_of_several_kinds_and_snapshots_are_pulled_through_any_fault(pages: str) -> None:
    seen = check_seeds(range(30), BRIEF, pages)
    assert min(seen[name] for name in ("pulled", "lent", "direct", "deaths")) > 0


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("pages", PAGES)
def test_answers_are_exact_in_five_thousand_seeds_of_several_pages_and_states(pages: str) -> None:
    check_seeds(range(5_000), pages=pages)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_answers_are_exact_and_blocks_conserved_in_fifty_thousand_seeds() -> None:
    check_seeds(range(52_000))


def test_a_seed_takes_the_same_steps_every_time() -> None:
    assert run_seed(17) == run_seed(17)


def test_without_faults_what_an_engine_lends_another_one_uses() -> None:
    outcomes = [run_seed(seed) for seed in range(20)]
    whole = [each for each in outcomes if set(each.faults) == {""} and not each.num_deaths]
    assert sum(each.num_pulled_tokens for each in whole) > 0
    assert all(each.num_pulled_tokens <= each.num_lent_tokens for each in whole)


def leak(patch: pytest.MonkeyPatch) -> None:
    """A lease keeps its last block."""
    release = BlockLoads.release

    def keep_last(
        loads: BlockLoads,
        blocks: Sequence[int],
        hashes: Sequence[bytes],
        owner: Owner,
        parent: bytes = b"",
    ) -> None:
        release(loads, blocks[:-1] if parent else blocks, hashes, owner, parent)

    patch.setattr(BlockLoads, "release", keep_last)


def double_free(patch: pytest.MonkeyPatch) -> None:
    release_copied = BlockLeases._release_copied

    def twice(leases: BlockLeases) -> bool:
        copying = list(leases._copies.leases)
        has_released = release_copied(leases)
        for lease in copying[: len(copying) - len(leases._copies.leases)]:
            leases._pool.release(lease.blocks)
        return has_released

    patch.setattr(BlockLeases, "_release_copied", twice)


def stranded_lease(patch: pytest.MonkeyPatch) -> None:
    """A lease whose engine is gone keeps its slots."""
    patch.setattr(BlockLeases, "end", lambda leases, number, num_copied: None)


def stale_hash(patch: pytest.MonkeyPatch) -> None:
    """A record of another block is taken for the one that was asked for."""
    real = BlockSeal.is_block

    def any_hash(
        seal: BlockSeal,
        header: Buffer,
        payload: Buffer,
        key: bytes,
        namespace: bytes,
        block_hash: bytes,
    ) -> bool:
        found = seal.read_header(header)
        return found is not None and real(
            seal, header, payload, key, found[0].namespace, found[0].block_hash
        )

    patch.setattr(BlockSeal, "is_block", any_hash)


def foreign_key(patch: pytest.MonkeyPatch) -> None:
    """A record of other weights is taken for one of these."""
    real = BlockSeal.is_block

    def any_key(
        seal: BlockSeal,
        header: Buffer,
        payload: Buffer,
        key: bytes,
        namespace: bytes,
        block_hash: bytes,
    ) -> bool:
        found = seal.read_header(header)
        return found is not None and real(
            seal, header, payload, found[0].key, namespace, block_hash
        )

    patch.setattr(BlockSeal, "is_block", any_key)


def torn_copy(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(block_record, "is_whole", lambda header, payload: True)


def unpinned_and_unchecked(patch: pytest.MonkeyPatch) -> None:
    """Blocks that are lent may be overwritten, and what the owner says after the copy does not
    count. Either alone does no harm."""
    unpin(patch)
    patch.setattr(Claim, "num_common", lambda before, after: len(before.hashes))


def unpin(patch: pytest.MonkeyPatch) -> None:
    pin_asked = BlockLeases._pin_asked

    def pin_and_let_go(leases: BlockLeases) -> None:
        known = set(map(id, leases._pinned))
        pin_asked(leases)
        for lease in leases._pinned:
            if id(lease) not in known:
                leases._pool.release(lease.blocks)

    patch.setattr(BlockLeases, "_pin_asked", pin_and_let_go)
    copy_late(patch, 4)
    # Those of direct leases are pinned.
    pinned = property(lambda leases: [] if leases._direct is None else leases._direct.pinned_blocks)
    patch.setattr(BlockLeases, "pinned_blocks", pinned)
    release = BlockLoads.release

    def only_of_rows(
        loads: BlockLoads,
        blocks: Sequence[int],
        hashes: Sequence[bytes],
        owner: Owner,
        parent: bytes = b"",
    ) -> None:
        if type(blocks) is not Unpinned:
            release(loads, blocks, hashes, owner, parent)

    patch.setattr(BlockLoads, "release", only_of_rows)
    patch.setattr(_Lease, "__setattr__", _mark_blocks)


def copy_late(patch: pytest.MonkeyPatch, num_turns: int) -> None:
    """Leases copy one time in so many that they could. That harms nobody, unless blocks that
    nothing holds are taken for something else meanwhile."""
    copy_pinned = BlockLeases._copy_pinned
    turns = count()

    def copy_in_its_turn(leases: BlockLeases, retired_step: int) -> None:
        if next(turns) % num_turns == 0:
            copy_pinned(leases, retired_step)

    patch.setattr(BlockLeases, "_copy_pinned", copy_in_its_turn)


class Unpinned(list[int]):
    """Blocks that a lease does not hold."""


def _mark_blocks(lease: _Lease, name: str, value: object) -> None:
    if name == "blocks" and isinstance(value, list):
        value = Unpinned(value)
    object.__setattr__(lease, name, value)


def let_go_too_early(patch: pytest.MonkeyPatch) -> None:
    """What a lease copies from host memory or a file may be overwritten before it is copied."""
    hold_behind = BlockLeases._hold_behind

    def hold_and_let_go(leases: BlockLeases, lease: _Lease, hashes: Sequence[bytes]) -> None:
        hold_behind(leases, lease, hashes)
        for lender, held in lease.held:
            lender.let_go(held)
        lease.held.clear()

    patch.setattr(BlockLeases, "_hold_behind", hold_and_let_go)
    copy_late(patch, 12)


def unread_is_lent(patch: pytest.MonkeyPatch) -> None:
    """A file that is torn or gone is lent as if it had been read."""
    read = _RecordWriter._read

    def read_all(writer: _RecordWriter, lease: _Lease) -> int:
        read(writer, lease)
        return len(lease.reads)

    patch.setattr(_RecordWriter, "_read", read_all)


def lost_wake_up(patch: pytest.MonkeyPatch) -> None:
    """Who waited for a load hears nothing of its end."""

    def forget(queue: WaitingQueue, ticket: Ticket) -> Sequence[RequestState]:
        queue._awaiting.pop(ticket, None)
        return []

    patch.setattr(WaitingQueue, "load_ended", forget)


def lost_answer(patch: pytest.MonkeyPatch) -> None:
    """A pull that brought nothing is not noticed."""
    pulled = PeerBlocks.pulled

    def only_good(peers: PeerBlocks, answer: Pulled) -> None:
        if answer.before.hashes:
            pulled(peers, answer)

    patch.setattr(PeerBlocks, "pulled", only_good)


def answered_twice(patch: pytest.MonkeyPatch) -> None:
    """A second answer to a pull counts as the first did."""
    pulled = PeerBlocks.pulled

    def again(peers: PeerBlocks, answer: Pulled) -> None:
        part = peers._pulls.get(answer.pull)
        pulled(peers, answer)
        if part is not None:
            peers._pulls[answer.pull] = part

    patch.setattr(PeerBlocks, "pulled", again)


def slots_of_given_up_pulls(patch: pytest.MonkeyPatch) -> None:
    """Slots into which the link still writes are used again."""
    cancel = StagedLoads.cancel

    def free_at_once(loads: StagedLoads, ticket: Ticket) -> None:
        load = loads._by_ticket[ticket]
        cancel(loads, ticket)
        if load.num_reading:
            loads._free_slots.append(load.num_assigned - 1)

    patch.setattr(StagedLoads, "cancel", free_at_once)


def prefetch_keeps_blocks(patch: pytest.MonkeyPatch) -> None:
    """Blocks that a prefetch brought are held by it for ever."""
    settle = BlockLoads._end

    def keep(loads: BlockLoads, end: LoadEnd) -> SettledLoad:
        if isinstance(loads._open[end.ticket].source, EarlyPull):
            loads._pool.share(end.ticket.blocks[: end.num_usable])
        return settle(loads, end)

    patch.setattr(BlockLoads, "_end", keep)


def prefetch_sleeps_on(patch: pytest.MonkeyPatch) -> None:
    """An engine that has nothing else to do does not wake for its prefetches."""
    patch.setattr(Prefetches, "idle_seconds", None)


def prefetch_misses_its_load(patch: pytest.MonkeyPatch) -> None:
    """A prefetch does not notice that its load has ended."""
    patch.setattr(BlockLoads, "is_open", lambda loads, ticket: True)


def prefetch_asks_for_ever(patch: pytest.MonkeyPatch) -> None:
    """A holder that is gone is asked again and again."""
    add = Prefetches.add
    patch.setattr(Prefetches, "add", lambda self, new: add(self, replace(new, seconds=math.inf)))
    patch.setattr(prefetches, "MOST_EMPTY_ASKS", math.inf)


def prefetch_takes_all(patch: pytest.MonkeyPatch) -> None:
    """Prefetches take blocks that requests hold or need."""
    patch.setattr(Prefetches, "_num_spare", lambda self, needs: 1 << 20)


def prefetch_goes_beyond_its_share(patch: pytest.MonkeyPatch) -> None:
    """Prefetches take the slots of requests that wait."""
    patch.setattr(PeerBlocks, "most_early", lambda self, holder: 1 << 20)


def prefetch_goes_on(patch: pytest.MonkeyPatch) -> None:
    """A prefetch that was ended asks for more."""
    patch.setattr(Prefetches, "end", lambda self, number: None)


def early_load_is_kept(patch: pytest.MonkeyPatch) -> None:
    """A load of a prefetch is remembered beyond its end."""
    settle = PeerBlocks._settle

    def settle_if_not_early(peers: PeerBlocks, end: LoadEnd) -> None:
        if not peers._under_way[end.ticket].is_early:
            settle(peers, end)

    patch.setattr(PeerBlocks, "_settle", settle_if_not_early)


PLANTED = [
    leak,
    double_free,
    stranded_lease,
    stale_hash,
    foreign_key,
    torn_copy,
    let_go_too_early,
    unread_is_lent,
    unpinned_and_unchecked,
    lost_wake_up,
    lost_answer,
    answered_twice,
    slots_of_given_up_pulls,
    prefetch_keeps_blocks,
    prefetch_sleeps_on,
    prefetch_misses_its_load,
    prefetch_asks_for_ever,
    prefetch_takes_all,
    prefetch_goes_beyond_its_share,
    prefetch_goes_on,
    early_load_is_kept,
]
SHOWN_BY: dict[Callable[[pytest.MonkeyPatch], None], int] = {
    leak: 16,
    stale_hash: 42,
    foreign_key: 23,
    torn_copy: 6,
    let_go_too_early: 22,
    unread_is_lent: 39,
    unpinned_and_unchecked: 55,
    answered_twice: 12,
    prefetch_keeps_blocks: 31,
    prefetch_sleeps_on: 35,
    prefetch_goes_on: 127,
}
"""Seeds that are tried first: those that showed a fault when it was planted last. Another one may
by now."""


@pytest.mark.parametrize("plant", PLANTED)
def test_a_planted_fault_is_caught(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    assert any(map(partial(breaks, run_seed), [SHOWN_BY.get(plant, 0), *range(MOST_SEEDS)]))


def another_snapshot(patch: pytest.MonkeyPatch) -> None:
    """A record of a page of any snapshot is taken for the one that was asked for."""
    real = BlockSeal.is_block

    def any_border(
        seal: BlockSeal,
        header: Buffer,
        payload: Buffer,
        key: bytes,
        namespace: bytes,
        block_hash: bytes,
    ) -> bool:
        found = seal.read_header(header)
        if found is not None and not is_block_hash(block_hash):
            block_hash = found[0].block_hash
        return real(seal, header, payload, key, namespace, block_hash)

    patch.setattr(BlockSeal, "is_block", any_border)


def test_a_snapshot_of_another_border_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    another_snapshot(monkeypatch)
    run = partial(run_seed, pages=PAGES["states"])
    # The first one showed it when it was planted.
    assert any(map(partial(breaks, run), [510, *range(MOST_SEEDS)]))


@pytest.mark.parametrize("num_seeds", [40, pytest.param(200, marks=pytest.mark.long)])
def test_blocks_that_are_overwritten_under_a_lease_are_not_used(
    num_seeds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    unpin(monkeypatch)
    assert not any(map(partial(breaks, run_seed), range(num_seeds)))
