"""Rows for which the executor drafts are planned ahead of what it found: random schedules, every
plan checked."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from headwater.engine_core.config import EngineConfig
from headwater.engine_core.executor import Int32Array
from headwater.engine_core.request import NewRequest
from headwater.engine_core.sampling_params import SamplingParams
from headwater.engine_core.scheduling.table.masks import RowIndices
from headwater.engine_core.scheduling.table.request_state import RequestState
from headwater.engine_core.scheduling.table.request_table import RequestTable
from tests.engine_core.checked_engine import Driver, HalfRightSpeculator
from tests.engine_core.checked_executor import BLOCK_SIZE, MAX_MODEL_LEN
from tests.engine_core.random_schedules import (
    IN_PARTS,
    MANY,
    SOME,
    VERY_MANY,
    Round,
    check_rounds,
    configs,
    rounds,
    swapping_configs,
)


class WaveringSpeculator(HalfRightSpeculator):
    """Lets rows run ahead, wait or neither, as it likes from step to step; rows that need more than
    a plain draw wait or do neither."""

    def __init__(self, seed: int, max_drafts: int, change: float) -> None:
        super().__init__(seed, max_drafts)
        self._change = change
        self._mode = 2
        self._seated: dict[int, RequestState] = {}
        self.num_own_drafts = 0

    def seat(self, request: RequestState) -> None:
        self._seated[request.row] = request
        self._mark(request.row)

    def vacate(self, row: int, token_ids: Int32Array) -> None:
        del self._seated[row]
        self.needs_result[row] = self.runs_ahead[row] = False

    def settle_drafts(
        self, rows: RowIndices, most: Int32Array, num_drafts: Int32Array, num_accepted: Int32Array
    ) -> None:
        assert (num_accepted <= num_drafts).all()
        assert (num_drafts <= most).all()
        self.num_own_drafts += int(num_drafts.sum())

    def settle(self, table: RequestTable, rows: RowIndices, first: Int32Array) -> None:
        if self._rng.random() < self._change:
            self._mode = int(self._rng.integers(3))
            for row in self._seated:
                self._mark(row)

    def lengths(self, rows: RowIndices, most: Int32Array, total: int) -> Int32Array:
        assert (most[~self.runs_ahead[rows]] == 0).all()
        wanted: Int32Array = self._rng.integers(0, most + 1).astype(np.int32)
        return wanted

    def _mark(self, row: int) -> None:
        request = self._seated[row]
        self.runs_ahead[row] = self._mode == 2 and self.serves(request) and not request.has_grammar
        self.needs_result[row] = self._mode == 1 and self.serves(request)


def knows_answers(driver: Driver, seed: int, share: float) -> None:
    """The executor drafts the answers, of which a share is wrong, and sometimes fewer than it
    may."""
    rng = np.random.default_rng(seed)

    def draft(row: int, num_known: int, most: int) -> Int32Array:
        request = driver.engine._scheduler.rows.table.requests[row]
        assert request is not None
        right = driver.streams[request.key].answer[num_known - request.num_prompt_tokens :]
        ids = right[: rng.integers(0, most + 1)]
        return np.array([3 if rng.random() < share else token for token in ids], np.int32)

    driver.executor._executor._draft = draft  # type: ignore[method-assign]


OWN_DRAFTS = given(
    configs() | swapping_configs(),
    st.sampled_from([0, 3, MANY]),
    st.sampled_from([0, 1, 4]),
    rounds(most_steps=40),
    st.integers(0, 1000),
    st.sampled_from([1, 4, BLOCK_SIZE - 1]),
    st.sampled_from([0.0, 0.05, 0.5]),
)


def check_own_drafts(
    config: EngineConfig,
    late_polls: int,
    mask_delay: int,
    several: list[Round],
    seed: int,
    max_drafts: int,
    change: float,
) -> None:
    speculator = WaveringSpeculator(seed, max_drafts, change)
    driver = check_rounds(
        config,
        late_polls,
        mask_delay,
        several,
        speculator,
        prepare=lambda each: knows_answers(each, seed, 0.2),
    )
    counts = driver.executor.num_tokens_of_drafts
    event(
        f"own drafts: {speculator.num_own_drafts > 0}, most gained: "
        f"{min(max(counts, default=0), 3)}"
    )


@SOME
@OWN_DRAFTS
@pytest.mark.filterwarnings("ignore:Generating overly large repr")
def test_whatever_the_executor_drafts_no_stream_changes_and_nothing_leaks(
    config: EngineConfig,
    late_polls: int,
    mask_delay: int,
    several: list[Round],
    seed: int,
    max_drafts: int,
    change: float,
) -> None:
    check_own_drafts(config, late_polls, mask_delay, several, seed, max_drafts, change)


@pytest.mark.long
@pytest.mark.timeout(1800)
@IN_PARTS
@VERY_MANY
@OWN_DRAFTS
@pytest.mark.filterwarnings("ignore:Generating overly large repr")
def test_executor_drafts_change_no_stream_in_many_more_schedules(
    part: int,
    config: EngineConfig,
    late_polls: int,
    mask_delay: int,
    several: list[Round],
    seed: int,
    max_drafts: int,
    change: float,
) -> None:
    check_own_drafts(config, late_polls, mask_delay, several, seed, max_drafts, change)


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_a_row_is_planned_while_its_drafts_are_in_flight(depth: int) -> None:
    """With everything right a row gains all drafts of every step, and steps are in flight all the
    time."""
    config = EngineConfig(
        block_size=BLOCK_SIZE,
        num_blocks=80,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=8,
        spare_rows=2,
        async_depth=depth,
    )
    driver = Driver(config, late_polls=MANY, speculator=WaveringSpeculator(3, 7, change=0.0))
    knows_answers(driver, 5, 0.0)
    for key in (1, 2, 4, 5, 7, 8):
        sampling = SamplingParams(temperature=1.0, seed=key, max_tokens=90)
        driver.add(
            NewRequest(key=key, prompt_ids=[3 + key] * key, output_ids=[], sampling=sampling)
        )
    driver.run()
    assert all(stream.tokens == stream.answer for stream in driver.streams.values())
    assert driver.executor.max_in_flight == depth
    load = driver.engine.load()
    assert load.num_accepted_tokens == load.num_draft_tokens > 100


def test_a_row_whose_drafts_a_plan_named_waits_for_them_although_it_may_run_ahead_by_now() -> None:
    """Another row's result changes the way of all rows while the drafts are in flight."""
    config = EngineConfig(
        block_size=BLOCK_SIZE,
        num_blocks=80,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=8,
        async_depth=4,
    )
    for seed in range(8):
        driver = Driver(config, late_polls=MANY, speculator=WaveringSpeculator(seed, 7, change=0.5))
        knows_answers(driver, seed, 0.2)
        for key in range(1, 7):
            sampling = SamplingParams(temperature=1.0, seed=key, max_tokens=90)
            driver.add(
                NewRequest(
                    key=key, prompt_ids=[3 + key] * (9 * key), output_ids=[], sampling=sampling
                )
            )
        driver.run()
        assert all(stream.tokens == stream.answer for stream in driver.streams.values())
