"""Sessions of agents on a simulated engine, in small."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headwater.bench.agent_engines import simulated
from headwater.bench.agent_load import Run, Session
from headwater.bench.agent_sessions import SHORT, Spread
from headwater.bench.agents import SIMULATED, bytes_per_token, compare, main
from headwater.bench.workloads import MODELS
from headwater.engine_core.config import BY_VALUE, LRU

LOAD = replace(
    SHORT,
    turns=Spread(12, 0.2),
    system=512,
    first_prompt=2048,
    longest=6144,
    answer=Spread(8, 0.3),
)
RUN = Run(load=LOAD, num_sessions=6, seconds=60.0, start_seconds=5.0)


def test_orders_serve_the_same_sessions_with_and_without_host_memory() -> None:
    outcomes = list(compare(RUN, simulated(RUN, 16_384), (LRU, BY_VALUE), (0, 32_768)))
    assert [(each.eviction, each.host_tokens) for each in outcomes] == [
        (LRU, 0),
        (BY_VALUE, 0),
        (LRU, 32_768),
        (BY_VALUE, 32_768),
    ]
    for each in outcomes:
        assert each.num_turns > 20
        assert 0 < each.hit_percent < 100
        assert each.ttft_p50 <= each.ttft_p99
        assert 0 < each.goodput <= each.num_turns / (RUN.seconds - RUN.start_seconds) + 1e-3
    assert outcomes[0].goodput_of_first == outcomes[2].goodput_of_first == 1.0
    # What the device evicts comes back from host memory.
    assert outcomes[2].hit_percent > outcomes[0].hit_percent


def test_with_memory_for_all_sessions_the_orders_are_alike() -> None:
    run = replace(RUN, num_sessions=3, seconds=30.0)
    lru, value = compare(run, simulated(run, 60_000), (LRU, BY_VALUE), (0,))
    assert (value.num_turns, value.hit_percent) == (lru.num_turns, lru.hit_percent)
    assert lru.hit_percent > 60


def test_a_prompt_goes_on_from_its_answer_and_gaps_are_cut() -> None:
    session = Session(replace(RUN, longest_gap=1.5), 0, [1] * LOAD.system, max_tokens=1 << 20)
    before = list(session.prompt)
    assert before[: LOAD.system] == [1] * LOAD.system
    gap = session.go_on([7, 8, 9])
    assert gap is not None
    assert gap <= 1.5
    assert session.prompt[: len(before) + 3] == [*before, 7, 8, 9]
    assert len(session.prompt) > len(before) + 3


def test_a_session_ends_where_its_next_prompt_does_not_fit() -> None:
    session = Session(RUN, 0, [1] * LOAD.system, max_tokens=2048)
    session.turns_left = 100
    gaps = [session.go_on([7] * 8) for _ in range(40)]
    assert gaps[-1] is None


def test_bytes_of_a_token_are_those_of_an_8b_model() -> None:
    assert bytes_per_token(MODELS["qwen3-8b"]) == 147_456


def test_an_order_that_is_not_known_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(Exception, match="eviction"):
        main(device=SIMULATED, eviction=["fifo"])
