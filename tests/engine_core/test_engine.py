"""What an engine does, one fact at a time; `test_engine_at_random.py` covers what happens when all
come together."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import count

import pytest

from headwater.engine_core.config import ConfigError
from headwater.engine_core.engine import Engine
from headwater.engine_core.executors.simulated.executor import SimulatedExecutor
from headwater.engine_core.executors.simulated.model import expected_tokens
from headwater.engine_core.kv.prefix_hash import block_hashes
from headwater.engine_core.request import FinishReason, NewRequest
from headwater.engine_core.sampling_params import SamplingParams
from headwater.engine_core.step_output import Finished
from tests.engine_core.recorded_engine import CONFIG, MODEL, Bench, prompt, request


@pytest.fixture(params=[1, 2, 4], ids=lambda depth: f"depth {depth}")
def bench(request: pytest.FixtureRequest) -> Bench:
    return Bench(replace(CONFIG, async_depth=request.param))


def test_a_request_is_answered_and_leaves_nothing(bench: Bench) -> None:
    bench.add(1, prompt(40), max_tokens=20)
    bench.run()
    assert bench.tokens(1) == expected_tokens(
        MODEL, prompt(40), SamplingParams(max_tokens=20, seed=1)
    )
    assert bench.finish(1) == Finished(key=1, reason=FinishReason.LENGTH, num_output_tokens=20)
    assert bench.engine.load().num_used_blocks == 0
    assert bench.engine.step() is None


def test_no_step_computes_past_the_length(bench: Bench) -> None:
    bench.add(1, prompt(10), max_tokens=5)
    bench.run()
    assert [plan.num_tokens for plan in bench.executor.plans] == [10, 1, 1, 1, 1]


def test_a_stop_id_ends_the_answer_and_what_was_planned_past_it_counts_nowhere(
    bench: Bench,
) -> None:
    answer = expected_tokens(MODEL, prompt(10), SamplingParams(max_tokens=50, seed=1))
    bench.add(1, prompt(10), max_tokens=50, stop_token_ids=(answer[6],))
    bench.run()
    assert bench.tokens(1) == answer[:7]
    assert bench.finish(1) == Finished(
        key=1, reason=FinishReason.STOP, num_output_tokens=7, stop_token_id=answer[6], error=""
    )
    assert bench.engine.load().num_generated_tokens == 7


@pytest.mark.parametrize("num_stop_ids", [1, 8, 9, 300])
def test_any_number_of_stop_ids_is_heeded(num_stop_ids: int) -> None:
    bench = Bench(CONFIG)
    answer = expected_tokens(MODEL, prompt(10), SamplingParams(max_tokens=8, seed=1))
    others = [token for token in range(1000) if token not in answer][: num_stop_ids - 1]
    bench.add(1, prompt(10), stop_token_ids=(*others, answer[3]))
    bench.run()
    assert bench.tokens(1) == answer[:4]


def test_stop_ids_before_min_tokens_do_not_stop(bench: Bench) -> None:
    answer = expected_tokens(MODEL, prompt(10), SamplingParams(max_tokens=50, seed=1))
    bench.add(1, prompt(10), max_tokens=50, min_tokens=4, stop_token_ids=(answer[3], answer[4]))
    bench.run()
    assert bench.tokens(1) == answer[:5]


def test_a_long_prompt_is_computed_in_chunks_beside_the_running(bench: Bench) -> None:
    bench.add(1, prompt(10), max_tokens=50)
    bench.steps(6)
    bench.add(2, prompt(200, first=1))
    bench.steps(5)
    counts = [plan.counts.tolist() for plan in bench.executor.plans if plan.counts.max() > 1][1:]
    assert counts == [[1, 63], [1, 63], [1, 63], [1, 11]]


def test_a_prompt_gets_no_more_of_a_step_than_the_chunk_limit() -> None:
    bench = Bench(replace(CONFIG, long_prefill_chunk=24))
    bench.add(1, prompt(60))
    bench.add(2, prompt(20, first=1))
    bench.steps(3)
    assert [plan.counts.tolist() for plan in bench.executor.plans] == [[24, 20], [1, 24], [1, 12]]


def test_an_answer_that_goes_on_does_not_wait_for_prompts(bench: Bench) -> None:
    """Neither for one that is being computed, nor for those that came before it."""
    bench.add(1, prompt(400, first=1))
    bench.steps(1)
    bench.add(2, prompt(300, first=2))
    answer = expected_tokens(MODEL, prompt(20), SamplingParams(max_tokens=30, seed=3))
    bench.engine.add(replace(request(3, prompt(20), max_tokens=30), output_ids=answer[:5]))
    num_planned = len(bench.executor.plans)
    bench.steps(2)
    # The answer's known tokens first, and what is left of the step for the prompt.
    assert bench.executor.plans[num_planned].counts.tolist() == [25, 64 - 25]
    bench.run()
    assert bench.tokens(3) == answer[5:]


@pytest.mark.parametrize(
    ("seconds_per_token", "seconds", "counts"),
    [
        (0.001, 0.3, [300, 300, 300]),
        (0.001, 0.02, [256, 256, 256, 132]),
        (0.0, 0.02, [256, 256, 256, 132]),
    ],
)
def test_a_step_computes_prompts_for_no_longer_than_it_may(
    seconds_per_token: float, seconds: float, counts: list[int]
) -> None:
    bench = Bench(replace(CONFIG, num_blocks=257, max_model_len=2048, max_num_batched_tokens=1024))
    bench.executor.prefill_seconds = seconds_per_token
    bench.engine.bound_prompts(seconds)
    bench.add(1, prompt(900), max_tokens=1)
    bench.run()
    assert [plan.num_tokens for plan in bench.executor.plans] == counts
    bench.engine.bound_prompts(0.0)
    bench.add(2, prompt(900, first=1), max_tokens=1)
    bench.run()
    assert bench.executor.plans[-1].num_tokens == 900


def test_the_next_turn_finds_the_last_one_cached(bench: Bench) -> None:
    bench.add(1, prompt(40), max_tokens=24)
    bench.run()
    # 64 tokens, of which the last was never computed: three full blocks.
    bench.add(2, prompt(40) + bench.tokens(1) + [5, 6, 7])
    bench.run()
    assert (bench.cached_tokens(1), bench.cached_tokens(2)) == (0, 48)
    assert (bench.engine.load().prefix_queries, bench.engine.load().prefix_hits) == (107, 48)


def test_another_namespace_hits_nothing(bench: Bench) -> None:
    bench.add(1, prompt(40))
    bench.run()
    bench.engine.add(replace(request(2, prompt(40)), namespace=b"b" * 16))
    bench.run()
    assert bench.cached_tokens(2) == 0


def test_choices_of_a_request_share_the_prompt_from_the_step_that_schedules_it(
    bench: Bench,
) -> None:
    for choice_index in range(3):
        bench.engine.add(
            replace(request(choice_index, prompt(40), seed=5), choice_index=choice_index)
        )
    bench.steps(1)
    assert bench.executor.plans[0].counts.tolist() == [40, 8, 8]
    bench.run()
    sampling = SamplingParams(max_tokens=8, seed=5)
    for choice_index in range(3):
        assert bench.tokens(choice_index) == expected_tokens(
            MODEL, prompt(40), sampling, choice_index=choice_index
        )
    assert [bench.cached_tokens(key) for key in range(3)] == [0, 32, 32]


def test_a_choice_waits_for_what_another_is_about_to_compute_and_lets_others_pass() -> None:
    bench = Bench(replace(CONFIG, long_prefill_chunk=24))
    bench.add(1, prompt(40))
    bench.add(2, prompt(40))
    bench.add(3, prompt(20, first=1))
    bench.steps(2)
    assert [plan.counts.tolist() for plan in bench.executor.plans] == [[24, 20], [1, 16, 8]]
    bench.run()
    assert [bench.cached_tokens(key) for key in (1, 2, 3)] == [0, 32, 0]


@pytest.mark.parametrize("depth", [1, 3])
def test_a_follower_goes_on_alone_when_its_leader_is_cancelled(depth: int) -> None:
    bench = Bench(replace(CONFIG, long_prefill_chunk=24, async_depth=depth))
    bench.add(1, prompt(200))
    bench.add(2, prompt(200))
    bench.steps(2)
    assert [plan.counts.tolist() for plan in bench.executor.plans] == [[24], [24]]
    bench.engine.cancel(1)
    bench.run()
    assert bench.tokens(2) == expected_tokens(
        MODEL, prompt(200), SamplingParams(max_tokens=8, seed=2)
    )
    assert bench.cached_tokens(2) == 48


def test_a_cancelled_request_says_nothing_more_and_frees_its_blocks_with_the_steps_in_flight(
    bench: Bench,
) -> None:
    bench.add(1, prompt(40), max_tokens=100)
    bench.steps(8)
    num_reported = len(bench.tokens(1))
    bench.engine.cancel(1)
    bench.run()
    assert len(bench.tokens(1)) == num_reported
    assert bench.finish(1) == Finished(
        key=1, reason=FinishReason.CANCELLED, num_output_tokens=num_reported
    )
    assert bench.engine.load().num_used_blocks == 0


def test_at_depth_one_a_cancel_frees_at_once() -> None:
    bench = Bench(CONFIG)
    bench.add(1, prompt(40), max_tokens=100)
    bench.steps(3)
    assert bench.engine.load().num_used_blocks == 3
    bench.engine.cancel(1)
    assert bench.engine.load().num_used_blocks == 0


def test_cancelling_what_is_not_there_is_nothing(bench: Bench) -> None:
    bench.engine.cancel(99)
    assert not bench.engine.has_work()


def test_without_credit_a_request_keeps_its_blocks_and_others_go_on(bench: Bench) -> None:
    bench.engine.add(replace(request(1, prompt(20), max_tokens=9), credit=3))
    bench.add(2, prompt(20, first=1), max_tokens=30)
    bench.run()
    assert (len(bench.tokens(1)), len(bench.tokens(2))) == (3, 30)
    assert bench.engine.load().num_used_blocks == 2
    bench.engine.add_credit(1, 100)
    bench.run()
    assert bench.tokens(1) == expected_tokens(
        MODEL, prompt(20), SamplingParams(max_tokens=9, seed=1)
    )


def test_the_lower_tier_then_the_smaller_virtual_time_runs_first() -> None:
    bench = Bench(replace(CONFIG, policy="fair", max_num_seqs=1))
    ranks = {1: (0, 9.0), 2: (1, 0.0), 3: (0, 2.0)}
    for key, (tier, virtual_time) in ranks.items():
        bench.engine.add(replace(request(key, prompt(10)), tier=tier, virtual_time=virtual_time))
    bench.run()
    assert [start.key for output in bench.outputs for start in output.starts] == [3, 1, 2]


def test_a_resumed_answer_goes_on_where_it_was(bench: Bench) -> None:
    answer = expected_tokens(MODEL, prompt(40), SamplingParams(max_tokens=12, seed=1))
    bench.engine.add(replace(request(1, prompt(40), max_tokens=12), output_ids=answer[:5]))
    bench.run()
    assert bench.tokens(1) == answer[5:]
    assert [index for output in bench.outputs for index in output.first_index] == [
        5,
        6,
        7,
        8,
        9,
        10,
        11,
    ]
    assert bench.finish(1).num_output_tokens == 12


@pytest.mark.parametrize(
    ("new", "reason"),
    [
        (request(1, []), FinishReason.ERROR),
        (request(1, prompt(512)), FinishReason.ERROR),
        (request(1, prompt(513), max_tokens=0), FinishReason.ERROR),
        (replace(request(1, prompt(5), max_tokens=2), output_ids=[4, 4]), FinishReason.LENGTH),
        (replace(request(1, prompt(5), stop_token_ids=(4,)), output_ids=[4]), FinishReason.STOP),
    ],
    ids=[
        "empty",
        "no room for a token",
        "too long",
        "resumed at its length",
        "resumed at its stop",
    ],
)
def test_what_needs_no_step_ends_before_costing_one(new: NewRequest, reason: FinishReason) -> None:
    bench = Bench(CONFIG)
    bench.engine.add(new)
    assert bench.engine.has_work()
    bench.run()
    finished = bench.finish(1)
    assert finished.reason is reason
    assert bool(finished.error) == (reason is FinishReason.ERROR)
    assert bench.executor.plans == []


def test_an_answer_ends_at_the_context_length() -> None:
    bench = Bench(CONFIG)
    bench.add(1, prompt(510), max_tokens=100)
    bench.run()
    assert bench.finish(1) == Finished(key=1, reason=FinishReason.LENGTH, num_output_tokens=2)


def test_a_request_for_no_tokens_scores_its_prompt_and_ends(bench: Bench) -> None:
    bench.add(1, prompt(100), max_tokens=0, num_prompt_logprobs=2)
    bench.run()
    parts = [part for output in bench.outputs for part in output.prompt_logprobs]
    assert [(part.first_position, len(part.entries), part.last) for part in parts] == [
        (1, 64, False),
        (65, 35, True),
    ]
    assert [entry.top_ids[0] for part in parts for entry in part.entries] == prompt(100)[1:]
    assert bench.tokens(1) == []
    assert bench.finish(1) == Finished(key=1, reason=FinishReason.LENGTH, num_output_tokens=0)


def test_a_prompt_that_is_scored_hits_nothing(bench: Bench) -> None:
    bench.add(1, prompt(40))
    bench.run()
    bench.add(2, prompt(40), num_prompt_logprobs=0)
    bench.run()
    assert bench.cached_tokens(2) == 0


def test_a_block_is_announced_when_the_step_that_computes_it_retires() -> None:
    bench = Bench(replace(CONFIG, async_depth=2))
    bench.add(1, prompt(40), max_tokens=30)
    bench.steps(1)
    assert bench.outputs == []
    assert bench.engine.cached_block_hashes() == []
    bench.steps(1)
    hashes = block_hashes(b"\0" * 16, prompt(40), 16)
    events = bench.outputs[0].cache_events
    assert events is not None
    assert [chain.hashes for chain in events.stored] == [hashes]
    assert bench.engine.cached_block_hashes() == hashes


def test_without_prefix_caching_nothing_is_hit_or_announced() -> None:
    plain = Bench(replace(CONFIG, enable_prefix_caching=False))
    for key in range(2):
        plain.add(key, prompt(40), max_tokens=20)
        plain.run()
    assert plain.cached_tokens(1) == 0
    assert all(output.cache_events is None for output in plain.outputs)


def test_load_counts_what_runs_and_what_waits() -> None:
    bench = Bench(replace(CONFIG, max_num_seqs=1))
    bench.add(1, prompt(100))
    bench.add(2, prompt(30, first=1))
    assert (bench.engine.load().num_waiting, bench.engine.load().num_prefill_tokens) == (2, 130)
    bench.steps(1)
    load = bench.engine.load()
    assert (load.num_running, load.num_waiting, load.num_prefill_tokens) == (1, 1, 66)
    assert (load.num_used_blocks, load.num_total_blocks) == (7, 64)


def test_a_result_that_is_there_is_taken_before_the_flight_is_full() -> None:
    config = replace(CONFIG, async_depth=4)
    engine = Engine(config, SimulatedExecutor(config, MODEL))
    engine.add(request(1, prompt(10)))
    output = engine.step()
    assert output is not None
    assert output.keys == [1]


def test_waits_are_measured_on_the_engines_clock() -> None:
    engine = Engine(CONFIG, SimulatedExecutor(CONFIG, MODEL), clock=partial(next, count(0.0)))
    engine.add(request(1, prompt(10)))
    output = engine.step()
    assert output is not None
    (started,) = output.starts
    assert (started.queue_seconds, started.prefill_seconds) == (1.0, 1.0)


def test_a_pool_that_cannot_hold_one_full_context_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="num_blocks is 32; allowed: at least 33 for max_model_len 512"
    ):
        replace(CONFIG, num_blocks=32)
