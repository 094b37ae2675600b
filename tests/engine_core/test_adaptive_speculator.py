"""Rows wait for results where their drafts bring more than that costs, and nowhere else; requests'
words are kept."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from headwater.engine_core.config import EngineConfig
from headwater.engine_core.drafting.proposer import Proposal
from headwater.engine_core.drafting.step_costs import StepCosts
from headwater.engine_core.engine import Engine
from headwater.engine_core.executor import Int32Array, StepPlan
from headwater.engine_core.executors.simulated.executor import SimulatedExecutor, SimulatedTiming
from headwater.engine_core.executors.simulated.model import SimulatedModel, expected_tokens
from headwater.engine_core.request import FinishReason, NewRequest, Speculation
from headwater.engine_core.sampling_params import SamplingParams
from headwater.engine_core.scheduling.speculation.adaptive_speculator import AdaptiveSpeculator
from headwater.engine_core.scheduling.table.masks import RowIndices
from headwater.engine_core.scheduling.table.request_table import RequestTable
from headwater.engine_core.step_output import Work
from tests.long_values import long_but

NUM_ROWS = 8
MAX_DRAFTS = 7
MODEL = SimulatedModel(vocab_size=50)
FLAT = StepCosts.measured([1, 2, 4, 8, 16, 64], [1.0] * 6, gap=0.1)
"""A draft costs nothing but the gap."""
DEAR = StepCosts.measured([1, 64], [1.0, 64.0])
CONFIG = EngineConfig(
    num_blocks=400,
    max_model_len=800,
    max_num_seqs=NUM_ROWS,
    max_num_batched_tokens=200,
    max_draft_tokens=MAX_DRAFTS,
)
ANYTHING = Speculation()
IsRight = Callable[[int, int], bool]
"""Whether what is drafted for a request's output of that index is right."""


@dataclass
class Oracle:
    """A drafter that knows the answers, by the first token of the prompt."""

    is_right: IsRight = lambda key, index: True
    name: str = "oracle"
    match_len: int = 16
    answers: dict[int, list[int]] = field(default_factory=dict)
    num_prompt: dict[int, int] = field(default_factory=dict)
    asked: set[int] = field(default_factory=set)
    """Keys of requests for which something was to be drafted."""
    num_bytes: int = 5

    def seat(self, row: int, namespace: bytes, tenant: str, num_prompt: int) -> None:
        self.num_prompt[row] = num_prompt

    def vacate(self, row: int, token_ids: Int32Array) -> None:
        pass

    def propose(
        self, rows: Int32Array, token_ids: Int32Array, num_known: Int32Array, most: Int32Array
    ) -> Proposal:
        assert rows.shape == num_known.shape == most.shape, "one entry a row that is asked about"
        drafts = np.zeros((len(rows), MAX_DRAFTS), np.int32)
        num_drafts = np.zeros(len(rows), np.int32)
        for i, row in enumerate(rows.tolist()):
            key = int(token_ids[row, 0])
            first = int(num_known[i]) - self.num_prompt[row]
            self.asked.add(key)
            right = self.answers[key][first : first + int(most[i])]
            ids = [
                t if self.is_right(key, first + j) else (t + 1) % 50 for j, t in enumerate(right)
            ]
            num_drafts[i] = len(ids)
            drafts[i, : len(ids)] = ids
        return Proposal(
            drafts, num_drafts, np.where(num_drafts > 0, self.match_len, 0).astype(np.int32)
        )


class PlannedExecutor(SimulatedExecutor):
    """Keeps the plans."""

    def submit(self, plan: StepPlan) -> int:
        self.plans.append(plan)
        return super().submit(plan)

    plans: list[StepPlan]


class Run:
    """An engine whose drafters know the answers to what it is asked."""

    def __init__(
        self,
        *drafters: Oracle,
        costs: StepCosts = FLAT,
        max_drafts: int = MAX_DRAFTS,
        async_depth: int = 2,
        seconds_waiting: float = 0.0,
    ) -> None:
        """`seconds_waiting`: time of a step whose rows wait for results, where others take a
        second; 0: no time passes."""
        self.drafters = drafters
        self.now = 0.0
        self.seconds_waiting = seconds_waiting
        self.speculator = AdaptiveSpeculator(
            drafters,
            costs,
            num_rows=NUM_ROWS,
            max_drafts=max_drafts,
            vocab_size=MODEL.vocab_size,
            clock=lambda: self.now,
        )
        config = replace(CONFIG, async_depth=async_depth)
        self.executor = PlannedExecutor(
            config, MODEL, SimulatedTiming(late_polls=0 if async_depth == 2 else 1 << 20)
        )
        self.executor.plans = []
        self.engine = Engine(config, self.executor, speculator=self.speculator)
        self.answers: dict[int, list[int]] = {}
        for drafter in drafters:
            drafter.answers = self.answers
        self.tokens: dict[int, list[int]] = {}
        self.work: dict[int, Work] = {}
        self.waited: list[bool] = []
        """After each step, whether rows wait for results."""

    def add(
        self,
        key: int,
        max_tokens: int = 100,
        speculation: Speculation = ANYTHING,
        *,
        credit: int = 1 << 30,
    ) -> None:
        prompt = [key, 1, 2, 3]
        sampling = SamplingParams(max_tokens=max_tokens, seed=key)
        self.answers[key] = expected_tokens(MODEL, prompt, sampling)
        self.tokens[key] = []
        self.engine.add(
            NewRequest(
                key=key,
                prompt_ids=prompt,
                output_ids=[],
                sampling=sampling,
                speculation=speculation,
                credit=credit,
            )
        )

    def step(self) -> None:
        if self.seconds_waiting:
            self.now += self.seconds_waiting if self.is_waiting else 1.0
        output = self.engine.step()
        self.waited.append(self.is_waiting)
        if output is None:
            return
        tokens = iter(output.token_ids)
        for key, num_tokens in zip(output.keys, output.num_tokens, strict=True):
            self.tokens[key] += [next(tokens) for _ in range(num_tokens)]
        for finished in output.finishes:
            assert finished.work is not None
            self.work[finished.key] = finished.work
            if finished.reason is not FinishReason.CANCELLED:
                assert self.tokens[finished.key] == self.answers[finished.key]

    def run(self) -> None:
        while self.engine.has_work():
            self.step()

    @property
    def is_waiting(self) -> bool:
        return bool(self.speculator.needs_result.any())

    @property
    def longest_draft(self) -> int:
        return max(
            int(plan.num_drafts.max())
            for plan in self.executor.plans
            if plan.num_drafts is not None
        )


def test_drafts_that_pay_bring_an_answer_in_a_few_steps() -> None:
    run = Run(Oracle())
    run.add(1)
    run.run()
    assert run.work[1].num_accepted_tokens > 80
    assert run.work[1].num_steps < 25
    assert run.longest_draft == MAX_DRAFTS


def test_where_each_position_costs_a_step_no_row_ever_waits() -> None:
    run = Run(Oracle(), costs=DEAR)
    run.add(1)
    run.run()
    assert not any(run.waited)
    assert run.work[1].num_draft_tokens == 0


def test_a_wholly_wrong_drafter_costs_a_few_steps_of_waiting() -> None:
    run = Run(Oracle(lambda key, index: False))
    for key in range(10):
        run.add(key, 200)
        run.run()
    assert 0 < sum(run.waited) < 40, sum(run.waited)
    # Of 2000 tokens.
    assert sum(run.waited[500:]) == 0


@pytest.mark.long
def test_rows_seldom_wait_where_waiting_takes_longer_than_was_measured() -> None:
    """By the costs that were measured every draft pays: one of two tokens is right, and a step that
    waits takes a tenth longer. It takes three times as long."""
    run = Run(Oracle(lambda key, index: index % 2 == 0), seconds_waiting=3.0)
    for key in range(20):
        run.add(key, 400)
        run.run()
    assert any(run.waited)
    num_waited = sum(run.waited[400:])
    assert num_waited < 0.01 * len(run.waited[400:]), num_waited


def chance(share: float) -> IsRight:
    """Drafts of which so many are right, anywhere in the text."""
    return lambda key, index: random.Random(100_003 * key + index).random() < share


def seconds_of(is_right: IsRight, seconds_waiting: float, *, speculates: bool) -> float:
    """Seconds of a few long answers, one after another."""
    run = Run(Oracle(is_right), seconds_waiting=seconds_waiting)
    for key in range(5):
        run.add(key, 600, Speculation(is_on=speculates))
        run.run()
    return run.now


@pytest.mark.parametrize("seconds_waiting", long_but([1.1, 1.5, 3.0], 3.0))
@pytest.mark.parametrize("share", long_but([0.0, 0.05, 0.4, 0.6], 0.6))
def test_drafts_lose_at_most_a_hundredth_of_the_time_whatever_they_bring(
    share: float, seconds_waiting: float
) -> None:
    plain = seconds_of(chance(share), seconds_waiting, speculates=False)
    assert seconds_of(chance(share), seconds_waiting, speculates=True) < plain / 0.99


@pytest.mark.parametrize(
    ("share", "most"), [pytest.param(0.4, 0.7, marks=pytest.mark.long), (1.0, 0.15)]
)
def test_text_that_repeats_itself_is_as_fast_as_its_drafts_are_right(
    share: float, most: float
) -> None:
    plain = seconds_of(chance(share), 1.1, speculates=False)
    assert seconds_of(chance(share), 1.1, speculates=True) < most * plain


def test_drafters_are_seldom_asked_where_they_have_brought_nothing_for_long() -> None:
    run = Run(Oracle(lambda key, index: False), costs=DEAR)
    num_looks = 0
    watch = run.speculator._watch

    def counted(table: RequestTable, rows: RowIndices) -> None:
        nonlocal num_looks
        num_looks += 1
        watch(table, rows)

    run.speculator._watch = counted  # type: ignore[method-assign]
    run.add(1, 700)
    run.run()
    # 16 in the first steps, 16 more in 64 steps, then one in 16.
    assert num_looks < 32 + 700 / 16 + 2


def test_rows_wait_on_where_waiting_takes_as_long_as_was_measured() -> None:
    run = Run(Oracle(), seconds_waiting=1.1)
    run.add(1, 400)
    run.run()
    assert run.work[1].num_steps < 80


def test_rows_run_ahead_again_once_drafts_turn_wrong_and_wait_again_once_they_turn_right() -> None:
    run = Run(Oracle(lambda key, index: not 100 <= index < 300))
    run.add(1, 500)
    waits_at: dict[int, bool] = {}
    while run.engine.has_work():
        run.step()
        waits_at[len(run.tokens[1])] = run.is_waiting
    assert all(waits for n, waits in waits_at.items() if n < 100)
    # A drafter that was right for long is believed for long: here for 85 tokens.
    assert not any(waits for n, waits in waits_at.items() if 200 <= n < 300)
    assert all(waits for n, waits in waits_at.items() if 350 <= n < 480)


def test_rows_stop_waiting_for_a_useless_drafter_although_one_of_them_is_always_near_its_end() -> (
    None
):
    """Every six steps a request ends and another one comes. One that may gain few tokens says
    nothing about others."""
    run = Run(Oracle(lambda key, index: False))
    for key in range(60):
        run.add(key, 6 * (key + 1) if key < NUM_ROWS else 6 * NUM_ROWS)
    run.run()
    assert any(run.waited[:10])
    assert not any(run.waited[60:]), run.waited


def test_rows_stop_waiting_for_a_useless_drafter_whatever_their_readers_take() -> None:
    """Credit comes a few tokens at a time, so that no draft is ever as long as the request
    allows."""
    run = Run(Oracle(lambda key, index: index < 30))
    run.add(1, 400, credit=40)
    run.run()
    assert any(run.waited)
    run.waited.clear()
    while len(run.tokens[1]) < 400:
        run.engine.add_credit(1, 3)
        run.run()
    assert not any(run.waited[120:])


def test_drafts_are_compared_while_nothing_waits() -> None:
    """By the length of the match alone a draft would not pay."""
    costs = StepCosts.measured([1, 2, 4, 8, 16], [1.0, 1.2, 1.4, 1.8, 2.6], gap=0.3)
    run = Run(Oracle(match_len=1), costs=costs)
    run.add(1, 300)
    while not run.is_waiting:
        run.step()
    assert len(run.tokens[1]) > 5
    assert run.engine.load().num_draft_tokens == 0
    run.run()
    assert run.work[1].num_accepted_tokens > 150


def test_requests_that_ask_for_none_get_no_drafts_beside_others_that_do() -> None:
    run = Run(Oracle())
    for key in range(6):
        run.add(key, 80, Speculation(is_on=key % 2 == 0))
    run.run()
    assert run.drafters[0].asked == {0, 2, 4}
    assert [run.work[key].num_draft_tokens > 0 for key in range(6)] == [True, False] * 3


@pytest.mark.parametrize("num_steps", range(2, 10))
def test_a_row_whose_drafts_are_in_flight_is_not_planned_when_rows_stop_waiting(
    num_steps: int,
) -> None:
    """They stop in a step of another row, which wants no drafts, while several steps are in
    flight."""
    run = Run(Oracle(lambda key, index: index % 5 != 0), async_depth=4)
    run.add(1, 60)
    for _ in range(num_steps):
        run.step()
    for key in (2, 3):
        run.add(key, 60, Speculation(is_on=False))
        run.step()
    run.run()
    assert run.tokens == run.answers


def test_rows_never_wait_where_no_request_wants_drafts() -> None:
    run = Run(Oracle())
    run.add(1)
    run.run()
    assert run.is_waiting is False
    run.waited.clear()
    run.add(2, 100, Speculation(is_on=False))
    run.run()
    assert sum(run.waited) <= 2


@pytest.mark.parametrize(("asked", "longest"), [(1, 1), (3, 3), (0, MAX_DRAFTS), (31, MAX_DRAFTS)])
def test_a_request_has_as_many_drafts_of_a_step_as_it_allows(asked: int, longest: int) -> None:
    run = Run(Oracle())
    run.add(1, 200, Speculation(max_tokens=asked))
    run.run()
    assert run.longest_draft == longest


def test_a_request_that_names_a_drafter_is_served_by_no_other() -> None:
    first = Oracle(name="first", match_len=20)
    second = Oracle(name="second", match_len=2)
    run = Run(first, second)
    for key, name in enumerate(["", "first", "second", "unknown"]):
        run.add(key, 200, Speculation(drafter=name))
    run.run()
    assert first.asked == {0, 1}
    assert second.asked == {0, 2}
    assert [run.work[key].num_accepted_tokens > 0 for key in range(4)] == [True, True, True, False]


def test_the_longer_match_of_two_drafters_is_used() -> None:
    wrong = Oracle(lambda key, index: False, name="wrong", match_len=3)
    for drafters in [(Oracle(match_len=4), wrong), (wrong, Oracle(match_len=4))]:
        run = Run(*drafters)
        run.add(1, 200)
        run.run()
        assert run.work[1].num_accepted_tokens > 150
        assert run.speculator.num_bytes == 10


def test_a_request_inherits_nothing_that_was_known_of_the_row_before_it() -> None:
    """What is known of the row when the next request takes it is what is known of any that nobody
    has had."""
    run = Run(Oracle(match_len=5), costs=StepCosts.measured([1, 64], [1.0, 64.0]))
    run.add(1, 100)
    # It leaves in the middle of a draft, some of whose tokens were right.
    while len(run.tokens[1]) < 20 or not run.speculator._look_up._num_right[0]:
        run.step()
    run.engine.cancel(1)
    run.run()
    run.add(2, 30)
    while not run.tokens.get(2):
        run.step()
    rows = np.arange(2)
    match_lens = np.full(2, 5, np.int32)
    of_row, of_any = run.speculator._look_up._acceptance.of(rows, match_lens).tolist()
    assert run.speculator._look_up.num_tokens.nonzero()[0].tolist() == [0]
    assert of_row == of_any


class Wild(Oracle):
    """Proposes what it is not asked for."""

    def __init__(self, draft_ids: Sequence[int], num_drafts: int, match_len: int) -> None:
        super().__init__()
        self.wild = draft_ids, num_drafts, match_len

    def propose(
        self, rows: Int32Array, token_ids: Int32Array, num_known: Int32Array, most: Int32Array
    ) -> Proposal:
        draft_ids, num_drafts, match_len = self.wild
        each = np.ones(len(rows), np.int32)
        return Proposal(
            np.tile(np.array(draft_ids, np.int32), (len(rows), 1)),
            each * num_drafts,
            each * match_len,
        )


@pytest.mark.parametrize(
    ("draft_ids", "num_drafts", "match_len"),
    [
        ([7] * 40, 40, 16),
        ([7] * 3, 40, 16),
        ([7] * 7, -3, 16),
        ([7, -1, 7], 3, 16),
        ([1 << 30, 7], 2, 16),
        ([50], 1, 16),
        ([], 2, 16),
        ([7] * 7, 7, -9),
        ([7] * 7, 7, 1 << 30),
    ],
    ids=str,
)
def test_whatever_a_drafter_proposes_the_answer_is_the_same_and_drafts_are_legal(
    draft_ids: list[int], num_drafts: int, match_len: int
) -> None:
    run = Run(Wild(draft_ids, num_drafts, match_len))
    for key in range(3):
        run.add(key, 60, Speculation(max_tokens=5))
    run.run()
    assert {len(tokens) for tokens in run.tokens.values()} == {60}
    for plan in run.executor.plans:
        if plan.num_drafts is not None and plan.draft_ids is not None:
            assert plan.num_drafts.max() <= 5
            assert set(plan.draft_ids.tolist()) == {7}
