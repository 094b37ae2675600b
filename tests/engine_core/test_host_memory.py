"""Prompts of an engine that its device forgot and that come back from host memory."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headwater.bench.workloads import TINY
from headwater.engine_core.config import ConfigError, EngineConfig
from headwater.engine_core.engine import Engine
from headwater.engine_core.executors.build.single import build_executor
from headwater.engine_core.executors.simulated.executor import SimulatedExecutor, SimulatedTiming
from headwater.engine_core.executors.simulated.model import SimulatedModel, expected_tokens
from headwater.engine_core.options import ExecutorOptions
from headwater.engine_core.request import NewRequest
from headwater.engine_core.sampling_params import SamplingParams
from headwater.engine_core.waits_for import WaitsFor
from tests.engine_core.driven_engine import DrivenEngine

BLOCK_SIZE = 16
MODEL = SimulatedModel(vocab_size=1000)
CONFIG = EngineConfig(
    num_blocks=17,
    num_host_blocks=64,
    max_model_len=256,
    max_num_seqs=8,
    max_num_batched_tokens=64,
    block_size=BLOCK_SIZE,
)


class Bench(DrivenEngine):
    def __init__(self, late_polls: int = 3, **changes: Any) -> None:
        config = replace(CONFIG, **changes)
        executor = SimulatedExecutor(
            config, MODEL, SimulatedTiming(late_polls=late_polls), verify_every=1
        )
        super().__init__(Engine(config, executor))

    def add(self, key: int, first_token: int, num_tokens: int = 200, max_tokens: int = 8) -> None:
        self.tokens[key] = []
        prompt_ids = prompt(first_token, num_tokens)
        sampling = SamplingParams(seed=key, max_tokens=max_tokens)
        self.engine.add(
            NewRequest(key=key, prompt_ids=prompt_ids, output_ids=[], sampling=sampling)
        )


def prompt(first_token: int, num_tokens: int) -> list[int]:
    return [(first_token + 7 * i) % 1000 for i in range(num_tokens)]


def expected(key: int, first_token: int, max_tokens: int = 8) -> list[int]:
    return expected_tokens(
        MODEL, prompt(first_token, 200), SamplingParams(seed=key, max_tokens=max_tokens)
    )


def test_a_prompt_that_the_device_forgot_comes_back_with_the_same_answer() -> None:
    bench = Bench()
    for key, first_token in enumerate((0, 300, 600, 0)):
        bench.add(key, first_token)
        bench.run()
    assert bench.cached == {0: 0, 1: 0, 2: 0, 3: 192}
    assert bench.tokens[3] == expected(3, 0)
    load = bench.engine.load()
    assert load.num_swapped_in == 192
    assert load.num_swapped_out == 3 * 192
    assert (load.num_used_blocks, load.num_used_host_blocks, load.num_total_host_blocks) == (
        0,
        36,
        64,
    )


def test_without_host_memory_it_is_computed_again() -> None:
    bench = Bench(num_host_blocks=0)
    for key, first_token in enumerate((0, 300, 600, 0)):
        bench.add(key, first_token)
        bench.run()
    assert bench.cached[3] == 0


def test_others_decode_while_blocks_come_back_and_two_of_one_prefix_fetch_it_once() -> None:
    bench = Bench(num_blocks=65, num_host_blocks=80)
    for key in range(6):
        bench.add(key, 101 * key)
        bench.run()
    bench.add(7, 900, max_tokens=50)
    while not bench.tokens[7]:
        bench.step()
    bench.add(8, 0)
    bench.add(9, 0)
    output = len(bench.tokens[7])
    while not bench.tokens[8]:
        bench.step()
    assert len(bench.tokens[7]) > output + 5
    bench.run()
    assert (bench.cached[8], bench.cached[9]) == (192, 192)
    assert bench.engine.load().num_swapped_in == 192
    assert (bench.tokens[8], bench.tokens[9]) == (expected(8, 0), expected(9, 0))


def test_a_request_that_leaves_while_its_blocks_load_leaves_nothing_held() -> None:
    bench = Bench()
    for key, first_token in enumerate((0, 300)):
        bench.add(key, first_token)
        bench.run()
    bench.add(2, 0)
    bench.step()
    bench.engine.cancel(2)
    bench.run()
    load = bench.engine.load()
    assert (load.num_used_blocks, load.num_waiting, bench.tokens[2]) == (0, 0, [])
    assert load.num_swapped_in > 0
    # What came is there for the next.
    bench.add(3, 0)
    bench.run()
    assert (bench.cached[3], bench.engine.load().num_swapped_in) == (192, load.num_swapped_in)


def test_an_engine_that_only_waits_for_blocks_says_so() -> None:
    bench = Bench(late_polls=1000)
    for key, first_token in enumerate((0, 300)):
        bench.add(key, first_token)
        bench.run()
    bench.add(2, 0)
    bench.step()
    assert bench.engine.waits_for is WaitsFor.BLOCKS


def test_a_cpu_has_no_other_memory(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    options = ExecutorOptions(
        model_folder=tmp_path, device="cpu", load_format="dummy", kv_swap_memory=1 << 20
    )
    with pytest.raises(
        ConfigError, match="kv_swap_memory is 1048576; allowed: 0 on the platform cpu"
    ):
        build_executor(options, lambda phase, done, total: None)


def test_fewer_slots_than_none_are_refused() -> None:
    with pytest.raises(ConfigError, match="num_host_blocks is -1; allowed: 0 or more"):
        replace(CONFIG, num_host_blocks=-1)
