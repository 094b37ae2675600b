"""The engine under random adds, cancels, credits and shortages, at every depth, against what should be.

What should be: every stream is what `expected_tokens` says it is alone, every plan keeps the executor's contract, and
when all is done nothing is held.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from headwater.engine_core.config import EngineConfig
from headwater.engine_core.executors.simulated_model import UInt64Array, expected_tokens
from headwater.engine_core.kv.prefix_hash import expected_cached_tokens
from headwater.engine_core.request import NewRequest
from headwater.engine_core.sampling_params import SamplingParams
from headwater.engine_core.scheduling.adaptive_speculator import AdaptiveSpeculator
from tests.engine_core.checked_engine import (
    BLOCK_SIZE,
    MAX_MODEL_LEN,
    MODEL,
    Driver,
    HalfRightSpeculator,
    Sources,
    Stream,
    grammar,
)
from tests.engine_core.fixed_speculator import Undrafted
from tests.engine_core.lying_source import LyingSource

MANY = 1 << 30
LEADS = [list(range(start, start + 90)) for start in (0, 100)]


@st.composite
def configs(draw: st.DrawFn) -> EngineConfig:
    max_num_seqs, async_depth = draw(st.integers(1, 9)), draw(st.integers(1, 4))
    return EngineConfig(
        block_size=BLOCK_SIZE,
        num_blocks=1 + MAX_MODEL_LEN // BLOCK_SIZE + draw(st.sampled_from([0, 2, 5, 9, 24])),
        num_host_blocks=draw(st.sampled_from([0, 0, 1, 5, 40])),
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=max_num_seqs,
        spare_rows=max_num_seqs % 3,
        max_num_batched_tokens=draw(st.integers(max_num_seqs, 100)),
        long_prefill_chunk=draw(st.sampled_from([0, 0, 7, 16, 40])),
        decode_steps=draw(st.sampled_from([1, 1, 2, 5])),
        async_depth=async_depth,
        num_groups=draw(st.sampled_from([1, 1, async_depth, (async_depth + 1) // 2])),
        enable_prefix_caching=draw(st.sampled_from([True, True, True, False])),
        policy=draw(st.sampled_from(["fcfs", "priority"])),
    )


@st.composite
def swapping_configs(draw: st.DrawFn) -> EngineConfig:
    """The cache holds a prompt or two."""
    return replace(
        draw(configs()),
        num_blocks=1 + MAX_MODEL_LEN // BLOCK_SIZE + draw(st.sampled_from([0, 2])),
        num_host_blocks=draw(st.sampled_from([3, 12, 40])),
        enable_prefix_caching=True,
    )


@st.composite
def requests(draw: st.DrawFn, shortest_lead: int = 0) -> NewRequest:
    """Without its key."""
    lead = draw(st.sampled_from(LEADS))[: draw(st.integers(shortest_lead, 90))]
    tail = draw(st.lists(st.integers(0, 3), min_size=0 if lead else 1, max_size=10))
    min_tokens = draw(st.sampled_from([0, 0, 5]))
    stop_token_ids = draw(st.sampled_from([(2,), (2, 5), (), tuple(range(30, 43))]))
    sampling = SamplingParams(
        temperature=draw(st.sampled_from([0.0, 1.0])),
        seed=draw(st.integers(0, 3)),
        max_tokens=draw(st.sampled_from([0, 1, 2, 17, 33, 60, 90])),
        min_tokens=min_tokens,
        stop_token_ids=stop_token_ids,
        min_tokens_blocked_ids=draw(st.sampled_from([(), stop_token_ids])),
        num_logprobs=draw(st.sampled_from([None, None, 1, 3])),
        num_prompt_logprobs=draw(st.sampled_from([None, None, None, 1])),
    )
    choice_index = draw(st.integers(0, 1))
    has_grammar = draw(st.sampled_from([False, False, True]))
    answer = expected_tokens(
        MODEL,
        [*lead, *tail],
        sampling,
        choice_index=choice_index,
        max_model_len=MAX_MODEL_LEN,
        mask=grammar if has_grammar else None,
    )
    return NewRequest(
        key=0,
        prompt_ids=[*lead, *tail],
        output_ids=answer[: draw(st.sampled_from([0, 0, 0, 3, 20]))],
        sampling=sampling,
        choice_index=choice_index,
        has_grammar=has_grammar,
        namespace=draw(st.sampled_from([b"a" * 16, b"a" * 16, b"b" * 16])),
        credit=draw(st.sampled_from([MANY, MANY, 0, 1, 7])),
        tier=draw(st.integers(-1, 1)),
        virtual_time=draw(st.sampled_from([0.0, 1.5])),
        tenant=draw(st.sampled_from(["", "", "a", "b"])),
        weight=draw(st.sampled_from([0.5, 1.0, 3.0])),
        forks=draw(st.booleans()),
    )


@dataclass(frozen=True)
class Round:
    """What happens between some steps; requests are named by any number."""

    adds: list[NewRequest]
    num_steps: int
    cancels: list[int]
    credits: list[tuple[int, int]]
    stalls: list[int]


def rounds(shortest_lead: int = 0, most_steps: int = 12) -> st.SearchStrategy[list[Round]]:
    choice = st.integers(0, 100)
    one = st.builds(
        Round,
        adds=st.lists(requests(shortest_lead), min_size=1, max_size=6),
        num_steps=st.integers(0, most_steps),
        cancels=st.lists(choice, max_size=2),
        credits=st.lists(st.tuples(choice, st.integers(1, 9)), max_size=3),
        stalls=st.lists(choice, max_size=6),
    )
    return st.lists(one, min_size=2, max_size=7)


SCENARIOS = given(configs(), st.sampled_from([0, 3, MANY]), st.sampled_from([0, 1, 4]), rounds())
DRAFTERS = st.builds(HalfRightSpeculator, seed=st.integers(0, 1000), max_drafts=st.sampled_from([1, 4, BLOCK_SIZE - 1]))
SCENARIOS_WITH_DRAFTS = given(
    configs() | swapping_configs(), st.sampled_from([0, 3, MANY]), st.sampled_from([0, 1, 4]), rounds(), DRAFTERS
)
SWAPS = given(swapping_configs(), st.sampled_from([0, 3, MANY]), st.sampled_from([0, 4]), rounds(80, 60))
LIARS = st.lists(
    st.builds(
        partial,
        st.just(LyingSource),
        seed=st.integers(0, 1000),
        most_polls=st.sampled_from([0, 3, 60]),
        seconds_per_block=st.sampled_from([0.0, 1.0]),
        is_local=st.booleans(),
    ),
    min_size=1,
    max_size=3,
)
LIES = given(
    st.builds(replace, swapping_configs(), num_host_blocks=st.sampled_from([0, 0, 5, 40])),
    st.sampled_from([0, 3, MANY]),
    st.sampled_from([0, 4]),
    rounds(80, 60),
    LIARS,
)
SOME = settings(max_examples=24, deadline=None, suppress_health_check=list(HealthCheck))
VERY_MANY = settings(SOME, max_examples=10_000)


def check_rounds(
    config: EngineConfig,
    late_polls: int,
    mask_delay: int,
    rounds: list[Round],
    speculator: HalfRightSpeculator | AdaptiveSpeculator | Undrafted | None = None,
    sources: Sources | None = None,
    foretold: Callable[[Stream], list[int]] | None = None,
    prepare: Callable[[Driver], None] = lambda driver: None,
) -> Driver:
    driver = Driver(config, late_polls, mask_delay, speculator=speculator, sources=sources, foretold=foretold)
    prepare(driver)
    for each in rounds:
        for new in each.adds:
            driver.add(replace(new, key=len(driver.streams)))
            if new.forks:
                driver.add(replace(new, key=len(driver.streams), choice_index=2, output_ids=[]))
        for _ in range(each.num_steps):
            driver.step()
        for choice in each.cancels:
            driver.cancel(choice % len(driver.streams))
        for choice in each.stalls:
            driver.stall(choice % len(driver.streams))
        for choice, tokens in each.credits:
            driver.add_credit(choice % len(driver.streams), tokens)
    driver.run()
    for key in driver.streams:
        driver.add_credit(key, MANY)
    driver.run()
    driver.check_ends()
    event(f"grammars: {any(stream.new.has_grammar for stream in driver.streams.values())}")
    event(f"swapped in: {driver.engine.load().num_swapped_in > 0}")
    event(f"preempted: {driver.engine.load().num_preemptions > 0}")
    event(f"copied: {driver.engine.load().num_copied_blocks > 0}")
    event(f"steps in flight: {driver.executor.max_in_flight}")
    return driver


@SOME
@SCENARIOS
def test_every_stream_is_what_it_is_alone_and_nothing_leaks(
    config: EngineConfig, late_polls: int, mask_delay: int, rounds: list[Round]
) -> None:
    check_rounds(config, late_polls, mask_delay, rounds)


@SOME
@SWAPS
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
    config: EngineConfig, late_polls: int, mask_delay: int, rounds: list[Round], speculator: HalfRightSpeculator
) -> None:
    driver = check_rounds(config, late_polls, mask_delay, rounds, speculator)
    counts = driver.executor.num_tokens_of_drafts
    event(f"tokens of a row with drafts: {min(max(counts, default=0), 3)}, rolled back: {counts[1] > 0}")


@pytest.mark.long
@pytest.mark.timeout(1800)
@VERY_MANY
@SCENARIOS_WITH_DRAFTS
def test_nor_does_it_in_many_more_rounds_with_drafts(
    config: EngineConfig, late_polls: int, mask_delay: int, rounds: list[Round], speculator: HalfRightSpeculator
) -> None:
    check_rounds(config, late_polls, mask_delay, rounds, speculator)


@pytest.mark.long
@pytest.mark.timeout(1800)
@VERY_MANY
@SCENARIOS
def test_nothing_leaks_in_many_more_rounds(
    config: EngineConfig, late_polls: int, mask_delay: int, rounds: list[Round]
) -> None:
    check_rounds(config, late_polls, mask_delay, rounds)


@pytest.mark.long
@pytest.mark.timeout(1800)
@VERY_MANY
@SWAPS
def test_nor_does_it_in_many_more_rounds(
    config: EngineConfig, late_polls: int, mask_delay: int, rounds: list[Round]
) -> None:
    check_rounds(config, late_polls, mask_delay, rounds)


@pytest.mark.long
@pytest.mark.timeout(1800)
@VERY_MANY
@LIES
def test_nor_does_it_in_many_more_rounds_with_such_sources(
    config: EngineConfig,
    late_polls: int,
    mask_delay: int,
    rounds: list[Round],
    liars: list[Callable[[UInt64Array], LyingSource]],
) -> None:
    check_lies(config, late_polls, mask_delay, rounds, liars)


@settings(SOME, max_examples=20)
@given(st.integers(1, 4), st.lists(st.tuples(requests(), st.booleans()), min_size=2, max_size=8))
def test_one_after_another_hits_exactly_what_the_formula_says(depth: int, turns: list[tuple[NewRequest, bool]]) -> None:
    """Some are the next turn of the chat before them."""
    config = EngineConfig(
        block_size=BLOCK_SIZE,
        num_blocks=200,
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
        alone = replace(new, key=key, prompt_ids=prompt_ids, output_ids=[], namespace=b"a" * 16, credit=MANY)
        # Choices share more: see test_forks.py.
        driver.add(replace(alone, forks=False))
        driver.run()
        stream = driver.streams[key]
        common = max((shared(prompt_ids, ids) for ids in with_kv), default=0)
        is_scored = new.sampling.num_prompt_logprobs is not None
        assert stream.cached_tokens == (0 if is_scored else expected_cached_tokens(common, len(prompt_ids), BLOCK_SIZE))
        # The last token is sampled, never computed.
        chat = prompt_ids + stream.tokens
        with_kv.append(chat[: -1 if stream.tokens else None])
    driver.check_ends()


def shared(ours: list[int], theirs: list[int]) -> int:
    shorter = min(len(ours), len(theirs))
    differing = np.flatnonzero(np.array(ours[:shorter]) != np.array(theirs[:shorter]))
    return int(differing[0]) if differing.size else shorter


@pytest.mark.parametrize("seed", range(20))
def test_a_stalled_request_whose_drafts_were_rejected_is_not_preempted_in_the_step_that_computes_it(seed: int) -> None:
    """The drafts had taken all of its credit when it stalled, and give some back. The next request lacks blocks."""
    config = EngineConfig(
        block_size=BLOCK_SIZE, num_blocks=9, max_model_len=MAX_MODEL_LEN, max_num_seqs=2, max_num_batched_tokens=100
    )
    driver = Driver(config, late_polls=MANY, speculator=HalfRightSpeculator(seed, max_drafts=8))

    def add(key: int, prompt_len: int, credit: int) -> None:
        sampling, namespace = SamplingParams(max_tokens=30, seed=key), bytes([key]) * 16
        prompt_ids = list(range(prompt_len))
        new = NewRequest(key=key, prompt_ids=prompt_ids, output_ids=[], sampling=sampling, namespace=namespace)
        driver.add(replace(new, credit=credit))

    add(1, 60, 6)
    credit = driver.engine._scheduler.table.credit
    while not driver.streams[1].tokens or credit[driver.engine._requests[1].row] > 0:
        driver.step()
    driver.stall(1)
    driver.step()
    add(2, 90, MANY)
    driver.run()
    driver.add_credit(1, MANY)
    driver.run()
    driver.check_ends()


def test_who_yields_a_seat_does_not_take_it_back_before_the_one_it_yielded_to() -> None:
    """Two seats are held by answers that nobody reads. With one seat between them, two tenants once took it from each
    other at every step, and neither prompt was ever computed."""
    config = EngineConfig(
        block_size=BLOCK_SIZE,
        num_blocks=14,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=3,
        spare_rows=2,
        max_num_batched_tokens=11,
        enable_prefix_caching=False,
        policy="priority",
    )
    driver = Driver(config, late_polls=0)

    def add(tenant: str, prompt_len: int, virtual_time: float, *, credit: int = MANY, tier: int = 0) -> None:
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
