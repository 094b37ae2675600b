"""The engine under random adds, cancels, credits and shortages, at every depth, against what should
be.

What should be: every stream is what `expected_tokens` says it is alone, every plan keeps the
executor's contract, and when all is done nothing is held.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from headwater.engine_core.config import EngineConfig
from headwater.engine_core.executors.simulated.hashes import UInt64Array
from headwater.engine_core.request import NewRequest
from headwater.engine_core.sampling_params import SamplingParams
from tests.cached_tokens import expected_cached_tokens
from tests.engine_core.checked_engine import Driver, HalfRightSpeculator
from tests.engine_core.checked_executor import BLOCK_SIZE, MAX_MODEL_LEN
from tests.engine_core.lying_source import LyingSource
from tests.engine_core.random_schedules import (
    BY_VALUES,
    IN_PARTS,
    LIES,
    MANY,
    SCENARIOS,
    SCENARIOS_WITH_DRAFTS,
    SOME,
    SWAPS,
    VERY_MANY,
    Round,
    check_rounds,
    requests,
)


@SOME
@SCENARIOS
def test_every_stream_is_what_it_is_alone_and_nothing_leaks(
    config: EngineConfig, late_polls: int, mask_delay: int, rounds: list[Round]
) -> None:
    check_rounds(config, late_polls, mask_delay, rounds)


@SOME
@SWAPS
@pytest.mark.long
def test_nothing_changes_when_prefixes_leave_the_device_and_come_back(
    config: EngineConfig, late_polls: int, mask_delay: int, rounds: list[Round]
) -> None:
    check_rounds(config, late_polls, mask_delay, rounds)


@SOME
@LIES
def test_nothing_changes_whatever_block_sources_claim_fail_or_mix_up(
    config: EngineConfig,
    late_polls: int,
    mask_delay: int,
    rounds: list[Round],
    liars: list[Callable[[UInt64Array], LyingSource]],
) -> None:
    check_lies(config, late_polls, mask_delay, rounds, liars)


def check_lies(
    config: EngineConfig,
    late_polls: int,
    mask_delay: int,
    rounds: list[Round],
    liars: list[Callable[[UInt64Array], LyingSource]],
) -> None:
    sources: list[LyingSource] = []

    def build(kv_blocks: UInt64Array) -> list[LyingSource]:
        sources.extend(liar(kv_blocks) for liar in liars)
        return sources

    driver = check_rounds(config, late_polls, mask_delay, rounds, sources=build)
    assert not any(source.open for source in sources)
    driver.engine.close()
    assert all(source.is_closed for source in sources)
    event(f"given up: {any(source.cancelled for source in sources)}")


@SOME
@SCENARIOS_WITH_DRAFTS
def test_a_step_that_brings_a_row_more_or_fewer_tokens_changes_no_stream(
    config: EngineConfig,
    late_polls: int,
    mask_delay: int,
    rounds: list[Round],
    speculator: HalfRightSpeculator,
) -> None:
    driver = check_rounds(config, late_polls, mask_delay, rounds, speculator)
    counts = driver.executor.num_tokens_of_drafts
    event(
        f"tokens of a row with drafts: {min(max(counts, default=0), 3)}, rolled back: "
        f"{counts[1] > 0}"
    )


@pytest.mark.long
@pytest.mark.timeout(1800)
@IN_PARTS
@VERY_MANY
@SCENARIOS_WITH_DRAFTS
def test_drafts_change_no_stream_in_many_more_rounds(
    part: int,
    config: EngineConfig,
    late_polls: int,
    mask_delay: int,
    rounds: list[Round],
    speculator: HalfRightSpeculator,
) -> None:
    check_rounds(config, late_polls, mask_delay, rounds, speculator)


@pytest.mark.long
@pytest.mark.timeout(1800)
@IN_PARTS
@VERY_MANY
@SCENARIOS
def test_nothing_leaks_in_many_more_rounds(
    part: int, config: EngineConfig, late_polls: int, mask_delay: int, rounds: list[Round]
) -> None:
    check_rounds(config, late_polls, mask_delay, rounds)


@pytest.mark.long
@pytest.mark.timeout(1800)
@IN_PARTS
@VERY_MANY
@SWAPS
def test_company_changes_no_stream_in_many_more_rounds(
    part: int, config: EngineConfig, late_polls: int, mask_delay: int, rounds: list[Round]
) -> None:
    check_rounds(config, late_polls, mask_delay, rounds)


@SOME
@BY_VALUES
def test_eviction_by_value_changes_no_stream(
    config: EngineConfig,
    late_polls: int,
    mask_delay: int,
    rounds: list[Round],
    speculator: HalfRightSpeculator | None,
) -> None:
    check_rounds(config, late_polls, mask_delay, rounds, speculator)


@pytest.mark.long
@pytest.mark.timeout(1800)
@IN_PARTS
@VERY_MANY
@BY_VALUES
def test_eviction_by_value_changes_no_stream_in_many_more_rounds(
    part: int,
    config: EngineConfig,
    late_polls: int,
    mask_delay: int,
    rounds: list[Round],
    speculator: HalfRightSpeculator | None,
) -> None:
    check_rounds(config, late_polls, mask_delay, rounds, speculator)


@pytest.mark.long
@pytest.mark.timeout(1800)
@IN_PARTS
@VERY_MANY
@LIES
def test_block_sources_change_no_stream_in_many_more_rounds(
    part: int,
    config: EngineConfig,
    late_polls: int,
    mask_delay: int,
    rounds: list[Round],
    liars: list[Callable[[UInt64Array], LyingSource]],
) -> None:
    check_lies(config, late_polls, mask_delay, rounds, liars)


@SOME
@given(
    st.integers(1, 4),
    st.sampled_from([0, 40]),
    st.lists(st.tuples(requests(), st.booleans()), min_size=2, max_size=8),
)
def test_one_after_another_hits_exactly_what_the_formula_says(
    depth: int, window: int, turns: list[tuple[NewRequest, bool]]
) -> None:
    """Some are the next turn of the chat before them."""
    config = EngineConfig(
        block_size=BLOCK_SIZE,
        num_blocks=200,
        page_windows=(window,),
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=4,
        max_num_batched_tokens=30,
        async_depth=depth,
    )
    driver = Driver(config, late_polls=MANY)
    with_kv: list[list[int]] = []
    chat: list[int] = []
    for key, (new, is_next_turn) in enumerate(turns):
        prompt_ids = [*chat, *new.prompt_ids[-3:]] if is_next_turn else new.prompt_ids
        if len(prompt_ids) >= MAX_MODEL_LEN:
            continue
        alone = replace(
            new, key=key, prompt_ids=prompt_ids, output_ids=[], namespace=b"a" * 16, credit=MANY
        )
        # Choices share more: see test_forks.py.
        driver.add(replace(alone, forks=False))
        driver.run()
        stream = driver.streams[key]
        common = max((shared(prompt_ids, ids) for ids in with_kv), default=0)
        is_scored = new.sampling.num_prompt_logprobs is not None
        assert stream.cached_tokens == (
            0 if is_scored else expected_cached_tokens(common, len(prompt_ids), BLOCK_SIZE)
        )
        # The last token is sampled, never computed.
        chat = prompt_ids + stream.tokens
        with_kv.append(chat[: -1 if stream.tokens else None])
    driver.check_ends()


def shared(ours: list[int], theirs: list[int]) -> int:
    shorter = min(len(ours), len(theirs))
    differing = np.flatnonzero(np.array(ours[:shorter]) != np.array(theirs[:shorter]))
    return int(differing[0]) if differing.size else shorter


@pytest.mark.parametrize("seed", range(20))
def test_a_stalled_request_whose_drafts_were_rejected_is_not_preempted_in_the_step_that_computes_it(
    seed: int,
) -> None:
    """The drafts had taken all of its credit when it stalled, and give some back. The next request
    lacks blocks."""
    config = EngineConfig(
        block_size=BLOCK_SIZE,
        num_blocks=9,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=2,
        max_num_batched_tokens=100,
    )
    driver = Driver(config, late_polls=MANY, speculator=HalfRightSpeculator(seed, max_drafts=8))

    def add(key: int, prompt_len: int, credit: int) -> None:
        sampling = SamplingParams(max_tokens=30, seed=key)
        namespace = bytes([key]) * 16
        prompt_ids = list(range(prompt_len))
        new = NewRequest(
            key=key, prompt_ids=prompt_ids, output_ids=[], sampling=sampling, namespace=namespace
        )
        driver.add(replace(new, credit=credit))

    add(1, 60, 6)
    credit = driver.engine._scheduler.rows.table.credit
    while not driver.streams[1].tokens or credit[driver.engine._requests[1].row] > 0:
        driver.step()
    driver.stall(1)
    driver.step()
    add(2, 90, MANY)
    driver.run()
    driver.add_credit(1, MANY)
    driver.run()
    driver.check_ends()


def test_a_request_that_yields_its_seat_does_not_take_it_back_before_the_other_one() -> None:
    """Two seats are held by answers that nobody reads. With one seat between them, two tenants once
    took it from each other at every step, and neither prompt was ever computed."""
    config = EngineConfig(
        block_size=BLOCK_SIZE,
        num_blocks=14,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=3,
        spare_rows=2,
        max_num_batched_tokens=11,
        enable_prefix_caching=False,
        policy="fair",
    )
    driver = Driver(config, late_polls=0)

    def add(
        tenant: str, prompt_len: int, virtual_time: float, *, credit: int = MANY, tier: int = 0
    ) -> None:
        new = NewRequest(
            key=len(driver.streams),
            prompt_ids=list(range(prompt_len)),
            output_ids=[],
            sampling=SamplingParams(max_tokens=17, seed=1),
            tenant=tenant,
            virtual_time=virtual_time,
            credit=credit,
            tier=tier,
            weight={"a": 0.5, "b": 1.0, "c": 3.0}[tenant],
        )
        driver.add(new)

    add("a", 60, 0.0, credit=1)
    add("b", 40, 0.0, credit=1)
    for _ in range(40):
        driver.step()
    add("c", 50, 0.0, tier=1)
    add("a", 42, 0.5)
    driver.step()
    add("b", 39, 1.5)
    for _ in range(300):
        driver.step()
    assert [len(driver.streams[key].tokens) for key in (2, 3, 4)] == [17, 17, 17]
