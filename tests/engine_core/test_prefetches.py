"""Blocks that are pulled before their request comes, between two engines on the simulated
executor."""

from __future__ import annotations

import numpy as np
import pytest

from headwater.engine_core.executors.model import shared_kv
from headwater.engine_core.kv import block_leases, peer_blocks
from headwater.engine_core.kv.peer_link import PullRequest, ToLink
from headwater.engine_core.kv.prefetch import NewPrefetch
from headwater.engine_core.page_groups import page_key
from headwater.engine_core.request import Holder
from headwater.engine_core.scheduling.blocks import prefetches
from headwater.engine_core.step_output import StepOutput
from headwater.engine_core.waits_for import WaitsFor
from tests.engine_core.pulling_pair import (
    BLOCK,
    CHUNK_BLOCKS,
    HASHES,
    NAMESPACE,
    OTHER,
    PROMPT_BLOCKS,
    AtOnce,
    Pair,
)
from tests.simulation.tier_faults import PAGES


@pytest.fixture(autouse=True)
def lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (peer_blocks, block_leases, shared_kv):
        monkeypatch.setattr(module, "ThreadLane", AtOnce)


def test_blocks_come_while_the_holder_computes_later_ones() -> None:
    pair = Pair()
    pair.add(pair.a, 1)
    pair.prefetch()
    seen = []
    while not pair.tokens[1]:
        pair.turn()
        seen.append(pair.num_cached)
    # The first token: the blocks of the last chunk are missing, those of the others came one chunk
    # after another.
    assert pair.num_cached == PROMPT_BLOCKS - CHUNK_BLOCKS
    assert {*seen} >= {*range(0, PROMPT_BLOCKS, CHUNK_BLOCKS)}
    assert pair.b.load().num_running == pair.b.load().num_waiting == 0
    pair.until(lambda: not len(pair.prefetches))
    assert (pair.num_cached, pair.b.load().num_used_blocks) == (PROMPT_BLOCKS, 0)


def test_the_request_finds_them_as_hits_of_the_other_engine_and_only_pulls_the_rest() -> None:
    pair = Pair()
    pair.add(pair.a, 1)
    pair.prefetch()
    pair.until(lambda: bool(pair.tokens[1]))
    num_before = pair.num_cached
    pair.add(pair.b, 2, holder="a")
    pair.until(lambda: {1, 2} <= pair.ended)
    assert pair.tokens[2] == pair.tokens[1]
    assert pair.tiers[2] == {"peer": PROMPT_BLOCKS * BLOCK}
    load = pair.b.load()
    assert load.peers is not None
    assert load.peers.num_pulled == PROMPT_BLOCKS * BLOCK
    assert num_before * BLOCK <= load.peers.num_prefetched <= PROMPT_BLOCKS * BLOCK
    assert load.peers.num_discarded == 0
    assert len(pair.prefetches) == 0
    # A later request hits what is here.
    pair.add(pair.b, 3)
    pair.until(lambda: 3 in pair.ended)
    assert pair.tiers[3] == {}


@pytest.mark.parametrize("is_direct", [False, True], ids=["records", "direct"])
@pytest.mark.parametrize("pages", ["windows", "states", "window-and-states"])
def test_pages_of_all_kinds_and_a_snapshot_come_before_the_request_does(
    pages: str, is_direct: bool
) -> None:
    pair = Pair(pages=PAGES[pages], is_direct=is_direct)
    pair.add(pair.a, 1)
    pair.prefetch()
    pair.until(lambda: not len(pair.prefetches))
    assert pair.num_cached == PROMPT_BLOCKS
    pair.add(pair.b, 2)
    pair.until(lambda: {1, 2} <= pair.ended)
    assert pair.tokens[2] == pair.tokens[1]
    assert pair.tiers[2] == {"peer": PROMPT_BLOCKS * BLOCK}


def test_a_request_waits_for_the_snapshot_that_is_on_its_way() -> None:
    """And pulls none of the blocks that came before it again."""
    pair = Pair(pages=PAGES["states"])
    pair.add(pair.a, 1)
    pair.prefetch()
    pair.until(lambda: bool(pair.tokens[1]))
    assert 0 < pair.num_cached < PROMPT_BLOCKS
    pair.add(pair.b, 2, holder="a")
    pair.until(lambda: {1, 2} <= pair.ended)
    assert (pair.tokens[2], pair.tiers[2]) == (pair.tokens[1], {"peer": PROMPT_BLOCKS * BLOCK})
    load = pair.b.load()
    assert load.peers is not None
    assert load.peers.num_pulled == PROMPT_BLOCKS * BLOCK


def test_a_step_in_flight_is_waited_for_before_a_snapshot_of_it_is_lent() -> None:
    pair = Pair(pages=PAGES["states"], late_polls=9)
    pair.add(pair.a, 1)
    pair.a.step()
    key = page_key(HASHES[CHUNK_BLOCKS - 1], 1)
    assert pair.a._scheduler.blocks._pool.find(key) is not None
    assert pair.a._in_flight.last_to_compute([key]) == pair.a._in_flight.youngest > 0


def test_blocks_are_announced_as_every_cached_block_is() -> None:
    pair = Pair()
    pair.add(pair.a, 1)
    pair.prefetch()
    sent = set[bytes]()
    receive = pair._receive

    def receive_events(output: StepOutput | None) -> None:
        if output is not None and output.cache_events is not None and not output.keys:
            sent.update(each for chain in output.cache_events.stored for each in chain.hashes)
        receive(output)

    pair._receive = receive_events  # type: ignore[method-assign]
    pair.until(lambda: not len(pair.prefetches))
    assert sent >= set(HASHES)


def test_what_running_and_waiting_requests_need_is_not_taken() -> None:
    pair = Pair(num_blocks=2 * PROMPT_BLOCKS)
    pair.add(pair.b, 1, OTHER, more=40)
    pair.add(pair.b, 2, [each + 1 for each in OTHER], more=40)
    pair.add(pair.a, 3)
    pair.prefetch()
    while 2 not in pair.ended:
        pair.turn()
        assert (
            pair.prefetches.num_loading_blocks
            <= pair.b._scheduler.blocks._pool.num_usable // prefetches.SPARE_SHARE
        )
    assert pair.b.load().num_preemptions == 0
    pair.until(lambda: pair.num_cached == PROMPT_BLOCKS)


def test_blocks_on_their_way_return_where_requests_lack_them() -> None:
    pair = Pair(num_blocks=PROMPT_BLOCKS + 6)
    pair.add(pair.a, 1)
    pair.until(lambda: 1 in pair.ended)
    pair.prefetch()
    # What is said to the holder is not delivered: the load stays open.
    pair.b.step()
    assert pair.prefetches.num_loading_blocks > 0
    pair.add(pair.b, 2, OTHER[: (PROMPT_BLOCKS + 4) * BLOCK])
    for _ in range(100):
        pair._receive(pair.b.step())
        pair.now += 0.1
        if pair.tokens[2]:
            break
    assert pair.tokens[2]
    pair.until(lambda: 2 in pair.ended and not len(pair.prefetches))
    assert pair.b.load().num_used_blocks == 0


def test_blocks_that_a_request_waited_for_return_where_others_lack_them_once_it_is_cancelled() -> (
    None
):
    pair = Pair(num_blocks=2 * PROMPT_BLOCKS)
    pair.add(pair.a, 1)
    pair.until(lambda: 1 in pair.ended)
    pair.prefetch()
    pair.b.step()
    [ticket, *_] = pair.prefetches._open[1].tickets
    pair.add(pair.b, 2)
    pair.b.step()
    assert pair.b._scheduler.seating.awaits(ticket)
    pair.b.cancel(2)
    pair.add(pair.b, 3, (2 * OTHER)[: (2 * PROMPT_BLOCKS - 2) * BLOCK])
    # What is said to the holder is not delivered: the load stays open.
    for _ in range(100):
        pair._receive(pair.b.step())
        pair.now += 0.1
        if pair.tokens[3]:
            return
    raise AssertionError("the load that nothing waits for holds the blocks")


@pytest.mark.parametrize("ended_at", [0, 3, 9])
def test_an_ended_prefetch_asks_no_more_and_holds_nothing(ended_at: int) -> None:
    pair = Pair()
    pair.add(pair.a, 1)
    pair.prefetch()
    pair.until(lambda: pair.num_cached >= ended_at)
    pair.b.end_prefetch(1)
    pair.b.end_prefetch(1)
    num_cached = pair.num_cached
    pair.until(lambda: 1 in pair.ended)
    # What was on its way still comes.
    assert num_cached <= pair.num_cached <= num_cached + prefetches.MOST_LOADS * CHUNK_BLOCKS
    assert (len(pair.prefetches), pair.b.load().num_used_blocks, pair.b.pause_seconds) == (
        0,
        0,
        None,
    )


def test_a_holder_that_has_nothing_is_asked_less_and_less_often_and_then_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pair = Pair()
    asked_at = list[float]()
    send = pair.link.send

    def note(sender: str, message: ToLink) -> None:
        if sender == "b":
            asked_at.append(pair.now)
        send(sender, message)

    monkeypatch.setattr(pair.link, "send", note)
    pair.prefetch(seconds=20.0)
    while len(pair.prefetches):
        sleep = pair.b.pause_seconds
        assert sleep is not None
        assert pair.b.waits_for in (WaitsFor.TIME, WaitsFor.NOTHING)
        pair.turn(max(sleep, 0.001))
    assert pair.now <= 21.0
    assert pair.b.waits_for is WaitsFor.WORK
    pauses = np.diff(np.unique(asked_at))
    assert prefetches.MIN_PAUSE_SECONDS - 1e-3 <= pauses[0] < pauses[-1]
    assert pauses[-1] >= prefetches.MAX_PAUSE_SECONDS - 1e-3


def test_a_prefetch_is_given_up_where_nothing_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetches, "MOST_EMPTY_ASKS", 8)
    pair = Pair()
    pair.prefetch(seconds=1e6)
    pair.until(lambda: not len(pair.prefetches))
    assert pair.now < 20


@pytest.mark.parametrize("is_direct", [False, True])
def test_a_prompt_whose_turn_comes_late_is_pulled_while_it_is_computed(is_direct: bool) -> None:
    pair = Pair(is_direct=is_direct)
    pair.prefetch()
    while pair.now < 10.0:
        pair.turn(0.01)
    pair.add(pair.a, 1)
    while 1 not in pair.ended:
        # Less than the longest pause.
        pair.turn(0.04)
    # Half of it at least, before its first token.
    assert pair.num_cached > PROMPT_BLOCKS / 2


def test_blocks_that_are_not_computed_yet_are_not_asked_for_as_records(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pair = Pair(is_direct=True)
    asked = list[PullRequest]()
    send = pair.link.send

    def note(sender: str, message: ToLink) -> None:
        asked.extend([message] if isinstance(message, PullRequest) else [])
        send(sender, message)

    monkeypatch.setattr(pair.link, "send", note)
    pair.prefetch()
    pair.turn()
    pair.add(pair.a, 1)
    pair.until(lambda: pair.num_cached == PROMPT_BLOCKS)
    assert len(asked) > PROMPT_BLOCKS / CHUNK_BLOCKS
    assert all(each.is_direct for each in asked)
    load = pair.b.load()
    assert load.peers is not None
    assert load.peers.num_direct == PROMPT_BLOCKS * BLOCK
    assert load.peers.num_discarded == 0


def test_a_request_that_waits_for_a_load_which_brings_too_little_pulls_the_rest() -> None:
    pair = Pair()
    pair.add(pair.a, 1)
    for _ in range(3):
        pair.a.step()
    pair.prefetch()
    # The holder has the first of these.
    pair.b.step()
    assert pair.prefetches.num_loading == prefetches.MOST_LOADS
    pair.add(pair.b, 2, holder="a")
    pair.b.step()
    pair.until(lambda: {1, 2} <= pair.ended)
    assert pair.tokens[2] == pair.tokens[1]
    load = pair.b.load()
    assert load.peers is not None
    assert load.peers.num_pulled > CHUNK_BLOCKS * BLOCK


def test_the_time_of_early_loads_does_not_count_for_pulls() -> None:
    pair = Pair()
    assert pair.b._tiers.peers is not None
    before = pair.b._tiers.peers.seconds_per_block
    pair.add(pair.a, 1)
    pair.prefetch()
    pair.until(lambda: not len(pair.prefetches))
    assert pair.b._tiers.peers.seconds_per_block == before


@pytest.mark.parametrize(
    ("is_direct", "most"), [(False, 3), (True, prefetches.MOST_LOADS * CHUNK_BLOCKS)]
)
def test_half_of_the_slots_are_left_for_requests_and_direct_copies_need_none(
    is_direct: bool, most: int
) -> None:
    pair = Pair(num_peer_blocks=12, is_direct=is_direct)
    pair.add(pair.a, 1)
    pair.until(lambda: 1 in pair.ended)
    pair.prefetch()
    seen = 0
    while pair.num_cached < PROMPT_BLOCKS:
        pair.turn()
        seen = max(seen, pair.prefetches.num_loading_blocks)
    assert most - 1 <= seen <= most


def test_an_engine_that_pulls_nothing_ignores_prefetches() -> None:
    pair = Pair(num_peer_blocks=0)
    pair.b.prefetch(
        NewPrefetch(
            number=1,
            hashes=HASHES,
            namespace=NAMESPACE,
            tenant="",
            holder=Holder(address="a", epoch=1, num_tokens=9),
            chunk_blocks=CHUNK_BLOCKS,
            seconds=60.0,
        )
    )
    pair.b.end_prefetch(1)
    assert pair.b.pause_seconds is None
    assert not pair.b.has_work() or pair.b.step() is None
