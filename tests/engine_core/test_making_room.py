"""Which requests an engine preempts when seats or blocks run out, and what becomes of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headwater.engine_core.config import EngineConfig
from headwater.engine_core.engine import Engine
from headwater.engine_core.executors.simulated.model import expected_tokens
from headwater.engine_core.sampling_params import SamplingParams
from tests.engine_core.recorded_engine import (
    CONFIG,
    MODEL,
    Bench,
    RecordingExecutor,
    prompt,
    request,
)


def stalled_bench(config: EngineConfig) -> Bench:
    """Requests 1 and 2 run, without credit after three tokens each."""
    bench = Bench(config)
    for key in (1, 2):
        bench.engine.add(replace(request(key, prompt(20, first=key), max_tokens=9), credit=3))
    bench.run()
    return bench


@pytest.mark.parametrize(
    "config",
    [replace(CONFIG, max_num_seqs=2), replace(CONFIG, num_blocks=6, max_model_len=80)],
    ids=["seats", "blocks"],
)
def test_a_stalled_request_makes_room_for_waiting_ones_and_goes_on_with_the_same_tokens(
    config: EngineConfig,
) -> None:
    bench = stalled_bench(config)
    bench.add(3, prompt(20, first=3), max_tokens=9)
    bench.run()
    assert (bench.tokens(3), bench.engine.load().num_waiting) == ([], 1)
    bench.engine.stall(1)
    bench.engine.stall(2)
    bench.run()
    assert len(bench.tokens(3)) == 9
    # Only one had to leave; it waits without being prompt tokens that anyone could compute.
    load = bench.engine.load()
    assert (load.num_running, load.num_waiting, load.num_preemptions, load.num_prefill_tokens) == (
        1,
        1,
        1,
        0,
    )
    for key in (1, 2):
        bench.engine.add_credit(key, 100)
    bench.run()
    for key in (1, 2):
        sampling = SamplingParams(max_tokens=9, seed=key)
        assert bench.tokens(key) == expected_tokens(MODEL, prompt(20, first=key), sampling)


def test_a_stalled_request_keeps_seat_and_blocks_while_none_waits() -> None:
    bench = stalled_bench(CONFIG)
    bench.engine.stall(1)
    bench.add(3, prompt(20, first=3), max_tokens=9)
    bench.run()
    assert (bench.engine.load().num_preemptions, bench.engine.load().num_running) == (0, 2)


def test_only_the_waiting_time_of_a_preempted_request_raises_its_tier() -> None:
    now = 100.0
    config = replace(CONFIG, max_num_seqs=1, policy="fair")
    engine = Engine(config, RecordingExecutor(config), clock=lambda: now)

    def run() -> int:
        """Steps the engine until it is idle or stalled, and returns the tier of request 1."""
        for _ in range(50):
            engine.step()
        return engine._requests[1].rank[0]

    def preempt(by: int, max_tokens: int) -> None:
        engine.stall(1)
        engine.add(request(by, prompt(20, first=by), max_tokens=max_tokens))

    engine.add(replace(request(1, prompt(20, first=1), max_tokens=9), credit=3, tier=1))
    tiers = [run()]
    now += 1000.0
    preempt(by=2, max_tokens=5)
    tiers.append(run())
    now += 20.0
    engine.add_credit(1, 2)
    tiers.append(run())
    now += 1000.0
    preempt(by=3, max_tokens=400)
    for seconds in (1, 8, 2):
        now += seconds
        tiers.append(run())
    assert (engine.load().num_preemptions, tiers) == (2, [1, 1, 1, 1, 1, 0])


def test_a_request_with_new_credit_is_not_preempted() -> None:
    bench = stalled_bench(replace(CONFIG, max_num_seqs=2))
    bench.engine.stall(1)
    bench.engine.add_credit(1, 1)
    bench.run()
    bench.add(3, prompt(20, first=3), max_tokens=9)
    bench.run()
    assert (bench.tokens(3), bench.engine.load().num_preemptions) == ([], 0)


def test_when_blocks_run_out_stalled_requests_are_preempted_first() -> None:
    bench = Bench(replace(CONFIG, num_blocks=8, max_model_len=112))
    bench.engine.add(replace(request(1, prompt(20, first=1), max_tokens=9), credit=3))
    bench.run()
    bench.engine.stall(1)
    bench.add(2, prompt(20, first=2), max_tokens=80)
    bench.run()
    work = bench.finish(2).work
    assert work is not None
    assert (len(bench.tokens(2)), work.num_preemptions, bench.engine.load().num_preemptions) == (
        80,
        0,
        1,
    )


def test_when_blocks_run_out_the_latest_is_recomputed_later_and_its_tokens_stay_the_same() -> None:
    bench = Bench(replace(CONFIG, num_blocks=14, max_model_len=128))
    for key in range(3):
        bench.add(key, prompt(30, first=key), max_tokens=60)
    bench.run()
    assert bench.engine.load().num_preemptions > 0
    for key in range(3):
        sampling = SamplingParams(max_tokens=60, seed=key)
        assert bench.tokens(key) == expected_tokens(MODEL, prompt(30, first=key), sampling)
    ends = [finish.key for output in bench.outputs for finish in output.finishes]
    assert ends == [0, 1, 2]
    works = [work for key in range(3) if (work := bench.finish(key).work) is not None]
    assert sum(work.num_preemptions for work in works) == bench.engine.load().num_preemptions
    assert works[0].num_preemptions == 0
    assert works[0].num_steps == 60
    assert 1 < works[0].mean_batch < 3


def test_no_request_is_seated_in_a_step_that_preempts() -> None:
    bench = Bench(replace(CONFIG, num_blocks=14, max_model_len=128, max_num_seqs=3, policy="fair"))
    for key in range(3):
        bench.add(key, prompt(30, first=key), max_tokens=60)
    bench.steps(1)
    bench.engine.add(replace(request(3, [3], max_tokens=2), tier=-1))
    while bench.engine.load().num_preemptions == 0:
        bench.steps(1)
    assert bench.executor.plans[-1].admitted == []
    bench.steps(1)
    assert [admitted.token_ids.tolist() for admitted in bench.executor.plans[-1].admitted] == [[3]]


def test_a_prompt_is_scored_once_though_a_preemption_computes_it_twice() -> None:
    config = replace(
        CONFIG,
        num_blocks=12,
        max_model_len=128,
        max_num_seqs=2,
        max_num_batched_tokens=3,
        policy="fcfs",
    )
    bench = Bench(config)
    bench.add(0, prompt(70), max_tokens=58)
    bench.add(1, prompt(80, first=100), max_tokens=1, num_prompt_logprobs=0)
    bench.run()
    assert bench.engine.load().num_preemptions > 0
    parts = [part for output in bench.outputs for part in output.prompt_logprobs]
    positions = [part.first_position + i for part in parts for i in range(len(part.entries))]
    assert positions == list(range(1, 80))
    assert [part.last for part in parts] == [False] * (len(parts) - 1) + [True]
