"""Random adds, cancels, credits and shortages for an engine that is checked at every step:
strategies and the run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from headwater.engine_core.config import BY_VALUE, EVICTIONS, VALUE_WAIT, EngineConfig
from headwater.engine_core.executors.simulated.model import expected_tokens
from headwater.engine_core.queue_policies import POLICIES
from headwater.engine_core.request import NewRequest
from headwater.engine_core.sampling_params import SamplingParams
from headwater.engine_core.scheduling.speculation.adaptive_speculator import AdaptiveSpeculator
from tests.engine_core.checked_engine import Driver, HalfRightSpeculator, Sources, Stream, grammar
from tests.engine_core.checked_executor import BLOCK_SIZE, MAX_MODEL_LEN, MODEL
from tests.engine_core.fixed_speculator import Undrafted
from tests.engine_core.lying_source import LyingSource

MANY = 1 << 30
LEADS = [list(range(start, start + 90)) for start in (0, 100)]


PAGE_WINDOWS = [(0,), (0,), (2,), (24,), (60,), (0, 2), (0, 24), (0, 60, 60), (0, 0, 24), (20, 40)]
"""Windows of page groups."""


def with_blocks(config: EngineConfig, num_spare: int) -> EngineConfig:
    """The config with so many blocks more than a sequence takes, whatever drafts beside it."""
    drafted = replace(config, max_draft_tokens=BLOCK_SIZE - 1)
    return replace(config, num_blocks=drafted.fewest_blocks + num_spare)


@st.composite
def configs(draw: st.DrawFn) -> EngineConfig:
    max_num_seqs = draw(st.integers(1, 9))
    async_depth = draw(st.integers(1, 4))
    config = EngineConfig(
        block_size=BLOCK_SIZE,
        num_blocks=1000,
        num_host_blocks=draw(st.sampled_from([0, 0, 1, 5, 40])),
        page_windows=draw(st.sampled_from(PAGE_WINDOWS)),
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=max_num_seqs,
        spare_rows=max_num_seqs % 3,
        max_num_batched_tokens=draw(st.integers(max_num_seqs, 100)),
        long_prefill_chunk=draw(st.sampled_from([0, 0, 7, 16, 40])),
        async_depth=async_depth,
        num_groups=draw(st.sampled_from([1, 1, async_depth, (async_depth + 1) // 2])),
        enable_prefix_caching=draw(st.sampled_from([True, True, True, False])),
        policy=draw(st.sampled_from([*POLICIES, "fair,1=srpt", "mlfq,1=slo"])),
        eviction=draw(st.sampled_from(EVICTIONS)),
        attention_pivot=draw(st.sampled_from([0, 40])),
    )
    return with_blocks(config, draw(st.sampled_from([0, 2, 5, 9, 24])))


@st.composite
def swapping_configs(draw: st.DrawFn) -> EngineConfig:
    """The cache holds a prompt or two."""
    config = draw(configs())
    return replace(
        with_blocks(config, draw(st.sampled_from([0, 2]))),
        num_host_blocks=draw(st.sampled_from([3, 12, 40])),
        enable_prefix_caching=True,
    )


@st.composite
def state_configs(draw: st.DrawFn) -> EngineConfig:
    """Configurations of engines whose model has state layers."""
    config = replace(
        draw(configs()),
        num_blocks=1000,
        num_host_blocks=0,
        num_groups=1,
        state_pages=draw(st.sampled_from([2, 3, 5])),
    )
    return with_blocks(config, draw(st.sampled_from([0, 2, 9, 40])))


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
    num_outputs = draw(st.sampled_from([0, 0, 0, 3, 20]))
    answer = expected_tokens(
        MODEL,
        [*lead, *tail],
        replace(sampling, max_tokens=min(sampling.max_tokens, num_outputs)),
        choice_index=choice_index,
        max_model_len=MAX_MODEL_LEN,
        mask=grammar if has_grammar else None,
    )
    return NewRequest(
        key=0,
        prompt_ids=[*lead, *tail],
        output_ids=answer,
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
        num_expected_tokens=draw(st.sampled_from([0, 5, 50])),
        age_seconds=draw(st.sampled_from([0.0, 0.5])),
        first_token_seconds=draw(st.sampled_from([0.0, 1e-3, 60.0])),
        token_seconds=draw(st.sampled_from([0.0, 0.03])),
        turn_kind=draw(st.sampled_from(["", "tool", "person"])),
        session=draw(st.sampled_from(["", "", "s", "t"])),
        cache_priority=draw(st.sampled_from([0, 0, -2, 3])),
        keep_seconds=draw(st.sampled_from([0.0, 0.0, 1e-3, 60.0])),
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
DRAFTERS = st.builds(
    HalfRightSpeculator,
    seed=st.integers(0, 1000),
    max_drafts=st.sampled_from([1, 4, BLOCK_SIZE - 1]),
)
SCENARIOS_WITH_DRAFTS = given(
    configs() | swapping_configs(),
    st.sampled_from([0, 3, MANY]),
    st.sampled_from([0, 1, 4]),
    rounds(),
    DRAFTERS,
)
SWAPS = given(
    swapping_configs(), st.sampled_from([0, 3, MANY]), st.sampled_from([0, 4]), rounds(80, 60)
)
STATES = given(
    state_configs(),
    st.sampled_from([0, 3, MANY]),
    st.sampled_from([0, 1, 4]),
    rounds() | rounds(60),
    DRAFTERS | st.none(),
)
BY_VALUES = given(
    st.builds(
        replace,
        configs() | swapping_configs() | state_configs(),
        eviction=st.sampled_from([BY_VALUE, VALUE_WAIT]),
    ),
    st.sampled_from([0, 3, MANY]),
    st.sampled_from([0, 1, 4]),
    rounds() | rounds(60),
    DRAFTERS | st.none(),
)
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
SOME = settings(max_examples=3, deadline=None, suppress_health_check=list(HealthCheck))
# A schedule takes 0.2 to 0.4 s. Parts end in time also on a busy machine, and may run beside one
# another.
VERY_MANY = settings(SOME, max_examples=500)
IN_PARTS = pytest.mark.parametrize("part", range(4))


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
    driver = Driver(
        config, late_polls, mask_delay, speculator=speculator, sources=sources, foretold=foretold
    )
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
