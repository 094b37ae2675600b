from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest

from headwater.engine_core.kv import block_record
from headwater.engine_core.kv.block_loads import BlockLoads, SettledLoad
from headwater.engine_core.kv.block_pool import BlockPool
from headwater.engine_core.kv.block_record import BlockSeal, Buffer
from headwater.engine_core.kv.block_source import LoadEnd, Outcome, Ticket
from headwater.engine_core.kv.page_keys import PageKeys
from headwater.engine_core.kv.snapshots import Snapshots
from headwater.engine_core.page_groups import page_key
from headwater.engine_core.scheduling.blocks.forks import Forks
from headwater.engine_core.scheduling.blocks.state_blocks import StateBlocks
from headwater.engine_core.scheduling.seating.seating import Seating
from headwater.engine_core.scheduling.seating.waiting_queue import WaitingQueue
from headwater.engine_core.scheduling.table.request_state import RequestState
from tests.long_values import long_but
from tests.simulation.late_saves import LateSaves
from tests.simulation.seeds import breaks
from tests.simulation.tier_faults import BRIEF, PAGES, WHOLE, Pace, run_seed

LONG = Pace(9)
"""With several pages a block and with states, so that prompts come again often."""
SEEDS = (range(350), range(350, 500), *(range(i, i + 500) for i in range(500, 2000, 500)))
"""`make test` runs the first ones."""
NUM_SEEDS = {"windows": 430, "states": 220, "window-and-states": 130, "latents": 650}
"""Seeds of `make test` by name of `PAGES`; 2,000 with `SEEDS` and those of `test_peer_faults`."""
MOST_SEEDS = 600
"""Within which a planted fault has to show."""


@pytest.fixture(autouse=True)
def _silent(caplog: pytest.LogCaptureFixture) -> None:
    """Disks are given up all the time."""
    caplog.set_level(logging.CRITICAL)


def check_seeds(seeds: range, pace: Pace = BRIEF, pages: str = "") -> Counter[str]:
    """What the seeds met with, added up. `pages`: a name of `PAGES`."""
    seen = Counter[str]()
    for seed in seeds:
        try:
            outcome = run_seed(seed, pace, PAGES.get(pages))
        except AssertionError as broken:
            command = f"python -m tests.simulation.tier_faults --first {seed}"
            command += f" --rounds {pace.num_rounds}" if pace != BRIEF else ""
            command += " --brief" if pace.budgets == BRIEF.budgets else ""
            command += f" --pages {pages}" if pages else ""
            pytest.fail(f"`{command}` repeats it: {broken}")
        seen.update(outcome.num_hits)
        seen["damaged"] += outcome.num_damaged
        seen["given up"] += outcome.is_disk_off
        seen["preempted"] += outcome.num_preemptions
        seen["copied"] += outcome.num_copied_blocks
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("seeds", long_but(SEEDS, SEEDS[0]), ids=str)
def test_after_any_fault_answers_are_exact_blocks_are_conserved_and_nobody_starves(
    seeds: range,
) -> None:
    seen = check_seeds(seeds)
    assert (
        min(
            seen[name]
            for name in ("host", "disk", "elsewhere", "damaged", "given up", "preempted", "copied")
        )
        > 0
    )


@pytest.mark.parametrize(("pages", "num_seeds"), NUM_SEEDS.items())
def test_answers_are_exact_where_blocks_have_several_pages_and_sequences_states(
    pages: str, num_seeds: int
) -> None:
    seen = check_seeds(range(num_seeds), BRIEF, pages)
    names = ("host", "disk", "elsewhere", "damaged", "given up", "copied")
    assert min(seen[name] for name in names) > 0


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_answers_are_exact_in_fifty_thousand_seeds() -> None:
    check_seeds(range(52_000), WHOLE)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("pages", PAGES)
def test_answers_are_exact_in_ten_thousand_seeds_of_several_pages_and_states(pages: str) -> None:
    check_seeds(range(5_000), LONG, pages)


def test_a_seed_takes_the_same_steps_every_time() -> None:
    assert run_seed(17) == run_seed(17)


def leak(patch: pytest.MonkeyPatch) -> None:
    release = BlockPool.release

    def but_one(pool: BlockPool, blocks: Sequence[int], **how: Any) -> None:
        release(pool, blocks[: max(len(blocks) - 1, 1)], **how)

    patch.setattr(BlockPool, "release", but_one)


def double_free(patch: pytest.MonkeyPatch) -> None:
    end = BlockLoads._end

    def twice(loads: BlockLoads, ended: LoadEnd) -> SettledLoad:
        settled = end(loads, ended)
        loads._pool.release(ended.ticket.blocks)
        return settled

    patch.setattr(BlockLoads, "_end", twice)


def stale_hash(patch: pytest.MonkeyPatch) -> None:
    """What a source says that it loaded is taken for what was asked."""
    patch.setattr(
        LoadEnd,
        "num_usable",
        property(lambda end: len(end.hashes) if end.outcome is Outcome.LOADED else 0),
    )


def stale_file(patch: pytest.MonkeyPatch) -> None:
    """A file of another block is taken for the one of its name."""
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


def wrong_generation(patch: pytest.MonkeyPatch) -> None:
    """A file of other weights or another version is taken for one of these."""
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


def lost_wake_up(patch: pytest.MonkeyPatch) -> None:
    """Who waited for a load hears nothing of its end."""

    def forget(queue: WaitingQueue, ticket: Ticket) -> Sequence[RequestState]:
        queue._awaiting.pop(ticket, None)
        return []

    patch.setattr(WaitingQueue, "load_ended", forget)


def lost_wake_up_of_forks(patch: pytest.MonkeyPatch) -> None:
    """Who waited for a request's last known tokens hears nothing of their step."""

    def forget(forks: Forks) -> list[RequestState]:
        forks._fresh.clear()
        forks._whole.clear()
        return []

    patch.setattr(Forks, "begin_step", forget)
    # That the request leaves would end the wait as well.
    patch.setattr(Seating, "note_left", lambda seating, leader: None)


def early_copy(patch: pytest.MonkeyPatch) -> None:
    """A block is copied in the step that fills it."""
    note = Forks.note_whole
    await_leader = WaitingQueue.await_leader
    queues: dict[int, WaitingQueue] = {}

    def remember(
        queue: WaitingQueue, leader: RequestState, request: RequestState, num_blocks: int
    ) -> None:
        queues[leader.key] = queue
        await_leader(queue, leader, request, num_blocks)

    def at_once(forks: Forks, request: RequestState) -> None:
        note(forks, request)
        forks._fresh.clear()
        forks._whole.clear()
        if request.key in queues:
            queues[request.key].leader_advanced(request, 1 << 30)

    patch.setattr(WaitingQueue, "await_leader", remember)
    patch.setattr(Forks, "note_whole", at_once)


def copy_without_hold(patch: pytest.MonkeyPatch) -> None:
    """A block that a step in flight copies is free for others at once."""
    take = Forks.take

    def unheld(forks: Forks, *args: object) -> object:
        partial = take(forks, *args)  # type: ignore[arg-type]  # as it was called
        if partial.num_tokens:
            forks._pool.release([forks._copied[-1][1]])
        return partial

    patch.setattr(Forks, "take", unheld)


def early_write(patch: pytest.MonkeyPatch) -> None:
    """A block is written before it is copied out."""
    patch.setattr(LateSaves, "protect", lambda saves, blocks: None)


def early_save(patch: pytest.MonkeyPatch) -> None:
    """A state set is copied out before the step that writes its state."""
    offer = StateBlocks._offer

    def at_once(blocks: StateBlocks, request: RequestState, block: int) -> None:
        offer(blocks, request, block)
        pages = blocks._pages_at(request, block)[blocks._pool.num_groups :]
        keys = blocks._pool.keys.of_set(request.chain.hashes[block - 1])
        for source in blocks._loads._keepers:
            source.save(keys, pages, [b""] * len(keys), request.chain.owner)
        blocks._loads._is_asked = True

    patch.setattr(StateBlocks, "_offer", at_once)


def lost_part(patch: pytest.MonkeyPatch) -> None:
    """A snapshot of which only the first page is there is taken for a whole one."""
    patch.setattr(
        PageKeys, "of_set", lambda keys, block_hash: [page_key(block_hash, keys._set_groups[0])]
    )
    real = Snapshots.find

    def first(snapshots: Snapshots, block_hash: bytes) -> list[int]:
        found = snapshots._pool.find(page_key(block_hash, snapshots._groups[0]))
        whole = real(snapshots, block_hash)
        return whole or ([] if found is None else [found] * len(snapshots._groups))

    patch.setattr(Snapshots, "find", first)


PLANTED = [
    leak,
    double_free,
    stale_hash,
    stale_file,
    wrong_generation,
    torn_copy,
    lost_wake_up,
    lost_wake_up_of_forks,
    early_copy,
    copy_without_hold,
    early_write,
]
SHOWN_BY: dict[Callable[[pytest.MonkeyPatch], None], int] = {
    stale_hash: 26,
    stale_file: 168,
    wrong_generation: 94,
    torn_copy: 20,
    early_write: 79,
}
"""Seeds that are tried first: those that showed a fault when it was planted last. Another one may
by now."""


@pytest.mark.parametrize(
    ("pages", "plant", "shown_by"),
    [
        ("windows", torn_copy, 200),
        ("windows", early_write, 53),
        ("states", early_save, 2),
        ("states", lost_part, 41),
        ("latents", torn_copy, 1),
        ("latents", early_write, 53),
    ],
)
def test_a_fault_planted_beside_windows_states_or_latents_is_caught(
    pages: str,
    plant: Callable[[pytest.MonkeyPatch], None],
    shown_by: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`shown_by`: see `SHOWN_BY`."""
    plant(monkeypatch)
    run = partial(run_seed, pace=BRIEF, pages=PAGES[pages])
    assert any(map(partial(breaks, run), [shown_by, *range(MOST_SEEDS)]))


@pytest.mark.parametrize("plant", PLANTED)
def test_a_planted_fault_is_caught(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    assert any(map(partial(breaks, run_seed), [SHOWN_BY.get(plant, 0), *range(MOST_SEEDS)]))
