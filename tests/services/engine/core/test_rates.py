from __future__ import annotations

import random

import pytest

from headwater.engine_core.config import EngineConfig
from headwater.engine_core.engine import Engine
from headwater.engine_core.executors.simulated.executor import SimulatedExecutor, SimulatedTiming
from headwater.engine_core.executors.simulated.model import SimulatedModel
from headwater.engine_core.request import NewRequest
from headwater.engine_core.sampling_params import SamplingParams
from headwater.services.engine.core.rates import MeasuredExecutor, Rates
from tests.long_values import long_but

TIMING = SimulatedTiming(
    step_seconds=0.004, seconds_per_request=0.0001, seconds_per_prefill_token=0.00005
)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.parametrize("depth", long_but((1, 2, 4), 2))
def test_the_rates_of_a_known_executor_are_found(depth: int) -> None:
    config = EngineConfig(
        num_blocks=4096,
        max_model_len=2048,
        max_num_seqs=64,
        max_num_batched_tokens=512,
        async_depth=depth,
    )
    clock = Clock()
    rates = Rates()
    rng = random.Random(1)
    simulated = SimulatedExecutor(
        config, SimulatedModel(vocab_size=1000), TIMING, clock=clock, sleep=clock.sleep
    )
    executor = MeasuredExecutor(simulated, clock)
    engine = Engine(config, executor, clock=clock)
    for key in range(120):
        prompt_ids = [rng.randrange(1000) for _ in range(rng.randrange(100, 600))]
        sampling = SamplingParams(max_tokens=rng.randrange(10, 200))
        engine.add(NewRequest(key=key, prompt_ids=prompt_ids, output_ids=[], sampling=sampling))
        for _ in range(8):
            engine.step()
            rates.observe(*executor.take())
    while engine.has_work():
        engine.step()
        rates.observe(*executor.take())
    assert rates.itl_per_request == pytest.approx(0.0001, rel=0.15)
    assert rates.itl(10) == pytest.approx(0.005, rel=0.1)
    assert rates.itl(50) == pytest.approx(0.009, rel=0.1)
    assert rates.prefill_tps == pytest.approx(20_000, rel=0.15)


def test_nothing_is_known_before_the_first_step() -> None:
    rates = Rates()
    rates.observe(0, 0, 0.0)
    assert (rates.prefill_tps, rates.itl(5), rates.itl_per_request) == (0.0, 0.0, 0.0)


def test_one_batch_size_teaches_the_time_of_a_step_and_no_slope() -> None:
    rates = Rates()
    for _ in range(100):
        rates.observe(0, 8, 0.01)
    assert rates.itl(8) == rates.itl(100) == pytest.approx(0.01)
    assert rates.itl_per_request == 0.0


def test_short_prompts_do_not_make_a_replica_look_slow() -> None:
    rates = Rates()
    for tokens in (16, 40, 20, 64, 30, 16, 50):
        rates.observe(tokens, 0, 0.05 + tokens / 2000)
    assert rates.prefill_tps == pytest.approx(2000)


def test_prompts_of_one_length_give_tokens_a_second_of_that_length() -> None:
    rates = Rates()
    for _ in range(10):
        rates.observe(100, 0, 0.1)
    assert rates.prefill_tps == pytest.approx(1000)


def test_an_executor_is_known_by_what_was_expected_until_it_has_computed_a_prompt() -> None:
    config = EngineConfig(
        num_blocks=99, max_model_len=1024, max_num_seqs=4, max_num_batched_tokens=512
    )
    clock = Clock()
    timing = SimulatedTiming(seconds_per_prefill_token=0.002)
    simulated = SimulatedExecutor(
        config, SimulatedModel(vocab_size=1000), timing, clock=clock, sleep=clock.sleep
    )
    assert MeasuredExecutor(simulated, clock, prefill_seconds=0.5).prefill_seconds == 0.002, (
        "the executor knows better"
    )
    simulated.prefill_seconds = 0.0
    executor = MeasuredExecutor(simulated, clock, prefill_seconds=0.5)
    assert executor.prefill_seconds == 0.5
    engine = Engine(config, executor, clock=clock)
    engine.add(
        NewRequest(
            key=1, prompt_ids=list(range(900)), output_ids=[], sampling=SamplingParams(max_tokens=1)
        )
    )
    while engine.has_work():
        engine.step()
    assert executor.prefill_seconds == pytest.approx(0.002)
