"""A step that is launched behind a copy of blocks, before they are known to be good."""

from __future__ import annotations

import pytest

from headwater.engine_core.engine import Engine
from headwater.engine_core.executors.shared_kv import SharedCopies
from headwater.engine_core.kv.published_blocks import BlocksView
from headwater.engine_core.lanes import Job
from headwater.engine_core.request import Holder, NewRequest
from headwater.engine_core.sampling_params import SamplingParams
from headwater.engine_core.scheduling.provisional_steps import ProvisionalSteps
from tests.engine_core.pulling_pair import BLOCK, OTHER, PROMPT, PROMPT_BLOCKS, Pair

MORE = 3
"""Tokens of each answer."""
FULL = PROMPT[: PROMPT_BLOCKS * BLOCK]
"""The step behind its copy fills a block."""


class HeldLane:
    """A lane whose jobs run when the test says so."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []

    def submit(self, job: Job) -> None:
        self.jobs.append(job)

    def run(self, num_left: int = 0) -> None:
        while len(self.jobs) > num_left:
            self.jobs.pop(0)()


class Setting:
    """Engine `b` waits for blocks of a prompt that `a` has computed, of which `num_left` are not
    copied yet."""

    def __init__(self, prompt_ids: list[int] = PROMPT, num_left: int = 5) -> None:
        self.pair = Pair(is_direct=True)
        self.lane = HeldLane()
        self._prompt_ids = prompt_ids
        peers = self.pair.b._tiers.peers
        assert peers is not None
        copies = peers._swapper.direct_copies
        assert isinstance(copies, SharedCopies)
        copies._lane = self.lane
        self.pair.add(self.pair.a, 1, prompt_ids, more=MORE)
        self.pair.until(lambda: 1 in self.pair.ended)
        self.pair.tokens[2] = []
        self.pair.b.add(self.request(2))
        self.pair.until(lambda: bool(self.lane.jobs))
        self.lane.run(num_left)

    def request(self, key: int) -> NewRequest:
        """With credit for each token once."""
        return NewRequest(
            key=key,
            prompt_ids=self._prompt_ids,
            output_ids=[],
            sampling=SamplingParams(seed=1, max_tokens=MORE),
            holder=Holder(address="a", epoch=1, num_tokens=len(self._prompt_ids)),
            credit=MORE,
        )

    @property
    def b(self) -> Engine:
        return self.pair.b

    @property
    def steps(self) -> ProvisionalSteps:
        return self.b._scheduler.provisional

    def finish(self) -> None:
        self.lane.run()
        self.pair.until(lambda: 2 in self.pair.ended and not self.b.has_work())
        assert self.b.load().num_used_blocks == 0

    @property
    def num_cached(self) -> int:
        """Leading blocks of the prompt that others may hit here."""
        return self.pair.num_cached


def change_blocks(monkeypatch: pytest.MonkeyPatch, num_unchanged: int) -> None:
    """All blocks but the leading ones are handed out again while they are copied."""
    monkeypatch.setattr(
        BlocksView, "num_unchanged", lambda view, found: min(num_unchanged, len(found.blocks))
    )


def test_a_step_is_launched_while_its_blocks_are_copied_and_said_when_they_are_good() -> None:
    here = Setting()
    here.pair.turn()
    assert here.steps.is_open
    assert len(here.b._in_flight) == 1
    for _ in range(5):
        here.pair.turn()
    assert (here.pair.tokens[2], here.num_cached) == ([], 0)
    here.finish()
    assert here.pair.tokens[2] == here.pair.tokens[1]
    assert here.pair.tiers[2] == {"peer": PROMPT_BLOCKS * BLOCK}
    assert (here.steps.num_steps, here.steps.num_void) == (1, 0)


def test_a_step_whose_copy_has_far_to_go_is_not_launched() -> None:
    here = Setting(num_left=PROMPT_BLOCKS - 1)
    here.pair.turn()
    assert here.steps.num_steps == 0


@pytest.mark.parametrize("num_unchanged", [0, 7])
@pytest.mark.parametrize("prompt_ids", [PROMPT, FULL], ids=["partial", "full"])
def test_a_step_that_read_wrong_blocks_is_computed_again(
    prompt_ids: list[int], num_unchanged: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = Setting(prompt_ids)
    change_blocks(monkeypatch, num_unchanged)
    here.pair.turn()
    assert here.steps.is_open
    here.finish()
    assert here.pair.tokens[2] == here.pair.tokens[1]
    assert (here.steps.num_steps, here.steps.num_void) == (1, 1)


@pytest.mark.parametrize("num_unchanged", [0, 7, PROMPT_BLOCKS])
def test_blocks_that_did_not_count_are_no_hits(
    num_unchanged: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = Setting()
    change_blocks(monkeypatch, num_unchanged)
    here.pair.turn()
    assert here.steps.is_open
    here.finish()
    load = here.b.load()
    num_hit = num_unchanged * BLOCK
    assert here.pair.tiers[2] == ({"peer": num_hit} if num_hit else {})
    assert (load.prefix_queries, load.prefix_hits) == (len(PROMPT), num_hit)
    assert sum(load.hits_by_tier.values()) == num_hit
    assert (load.num_resumed_kept, load.num_resumed_loaded, load.num_resumed_computed) == (0, 0, 0)


def test_a_block_that_the_step_fills_is_cached_once_the_others_are_good() -> None:
    here = Setting(FULL)
    here.pair.turn()
    assert here.steps.is_open
    assert here.b._scheduler.pool.cached_hashes() == []
    here.finish()
    assert here.num_cached == PROMPT_BLOCKS
    assert here.pair.tokens[2] == here.pair.tokens[1]


@pytest.mark.parametrize("num_unchanged", [0, PROMPT_BLOCKS])
def test_a_request_that_is_cancelled_meanwhile_leaves_nothing_behind(
    num_unchanged: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = Setting()
    change_blocks(monkeypatch, num_unchanged)
    here.pair.turn()
    assert here.steps.is_open
    here.b.cancel(2)
    here.finish()
    assert here.pair.tokens[2] == []


def test_a_request_that_comes_meanwhile_is_computed_behind_it() -> None:
    here = Setting()
    here.pair.turn()
    here.pair.add(here.b, 3, OTHER, more=MORE)
    here.pair.turn()
    assert (len(here.b._in_flight), here.steps.is_open) == (1, True)
    here.finish()
    here.pair.until(lambda: 3 in here.pair.ended)
    assert len(here.pair.tokens[3]) == MORE


def test_an_engine_that_computes_another_request_launches_no_step_behind_a_copy() -> None:
    here = Setting(num_left=PROMPT_BLOCKS)
    here.pair.add(here.b, 3, OTHER, more=30)
    here.pair.turn()
    here.lane.run(1)
    here.pair.turn()
    here.finish()
    assert here.steps.num_steps == 0
    assert here.pair.tokens[2] == here.pair.tokens[1]
