"""Engines that sleep and wake: tokens, prefixes and memory afterwards."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from headwater.engine_core.config import ConfigError, EngineConfig
from headwater.engine_core.engine import Engine
from headwater.engine_core.executor import MemoryShort
from headwater.engine_core.executors.build.single import build_executor
from headwater.engine_core.executors.device.mapped_weights import SMAPS, MappedWeights, mappings_of
from headwater.engine_core.executors.simulated.executor import SimulatedExecutor, SimulatedTiming
from headwater.engine_core.executors.simulated.model import SimulatedModel, expected_tokens
from headwater.engine_core.options import ExecutorOptions
from headwater.engine_core.request import NewRequest
from headwater.engine_core.sampling_params import SamplingParams
from headwater.engine_core.waits_for import WaitsFor
from headwater.engine_core.weights.model_file import WEIGHTS_NAME
from tests.engine_core.driven_engine import DrivenEngine
from tests.engine_core.small_models import SmallEngine, greedy
from tests.long_values import long_but

MODEL = SimulatedModel(vocab_size=1000)
CONFIG = EngineConfig(
    num_blocks=60,
    num_host_blocks=128,
    max_model_len=256,
    max_num_seqs=8,
    max_num_batched_tokens=64,
    block_size=16,
)


class Bench(DrivenEngine):
    def __init__(self, **changes: Any) -> None:
        self.executor = SimulatedExecutor(
            replace(CONFIG, **changes), MODEL, SimulatedTiming(late_polls=3), verify_every=1
        )
        memory = self.executor.releasable
        super().__init__(Engine(replace(CONFIG, **changes), self.executor, memory=memory))
        self.lost: list[bytes] = []

    def add(self, key: int, first_token: int, max_tokens: int = 40) -> None:
        self.tokens[key] = []
        self.engine.add(
            NewRequest(
                key=key,
                prompt_ids=prompt(first_token),
                output_ids=[],
                sampling=SamplingParams(seed=key, max_tokens=max_tokens),
            )
        )

    def fall_asleep(self) -> None:
        self.engine.sleep()
        for _ in range(100):
            if self.engine.is_asleep:
                break
            self.step()
        assert self.engine.is_asleep
        assert self.engine.waits_for is WaitsFor.WORK

    def cached_after(self, key: int, first_token: int) -> int:
        """Cached tokens of a new request with that prompt."""
        self.add(key, first_token, max_tokens=2)
        self.run()
        return self.cached[key]


def prompt(first_token: int) -> list[int]:
    return [(first_token + 7 * i) % 1000 for i in range(100)]


def expected(key: int, first_token: int, max_tokens: int = 40) -> list[int]:
    sampling = SamplingParams(seed=key, max_tokens=max_tokens)
    return expected_tokens(MODEL, prompt(first_token), sampling)


@pytest.mark.parametrize("async_depth", [1, 4])
@pytest.mark.parametrize("num_host_blocks", [128, 0])
def test_running_requests_go_on_with_the_same_tokens(
    async_depth: int, num_host_blocks: int
) -> None:
    bench = Bench(async_depth=async_depth, num_host_blocks=num_host_blocks)
    for key in range(3):
        bench.add(key, 100 * key)
    for _ in range(20):
        bench.step()
    begun = {key: len(tokens) for key, tokens in bench.tokens.items()}
    assert all(0 < num_tokens < 40 for num_tokens in begun.values())
    bench.fall_asleep()
    assert bench.engine.load().num_waiting == 3
    bench.engine.wake()
    bench.run()
    assert bench.tokens == {key: expected(key, 100 * key) for key in range(3)}
    load = bench.engine.load()
    assert load.num_preemptions == 3
    assert (load.num_resumed_loaded > 0) == (num_host_blocks > 0)


def test_the_old_prefix_is_a_hit_where_host_memory_holds_it() -> None:
    kept, dropped = Bench(), Bench(num_host_blocks=0)
    for bench in (kept, dropped):
        bench.add(0, 0)
        bench.run()
        bench.fall_asleep()
        bench.engine.wake()
    assert kept.cached_after(1, 0) == 96
    assert dropped.cached_after(1, 0) == 0


def test_hashes_that_host_memory_lacks_leave_the_index() -> None:
    hashes = {}
    for num_host_blocks in (128, 0):
        bench = Bench(num_host_blocks=num_host_blocks)
        bench.add(0, 0)
        bench.run()
        before = set(bench.engine.cached_block_hashes())
        bench.engine.sleep()
        output = bench.engine.step()
        lost = set() if output is None else set(output.cache_events.removed)
        assert bench.engine.is_asleep
        assert set(bench.engine.cached_block_hashes()) == before - lost
        hashes[num_host_blocks] = len(before), len(lost)
    assert hashes == {128: (8, 0), 0: (8, 8)}


def test_what_host_memory_cannot_hold_is_dropped_least_recently_used_first() -> None:
    bench = Bench(num_host_blocks=10)
    for key, first_token in enumerate((0, 100, 200)):
        bench.add(key, first_token, max_tokens=1)
        bench.run()
    bench.fall_asleep()
    bench.engine.wake()
    assert [bench.cached_after(3 + i, first) for i, first in enumerate((200, 0))] == [96, 0]


def test_an_engine_that_sleeps_takes_requests_and_cancels() -> None:
    bench = Bench()
    bench.fall_asleep()
    bench.add(0, 0)
    bench.add(1, 100)
    for _ in range(5):
        bench.step()
    assert bench.tokens == {0: [], 1: []}
    # Whose turn it is goes by those that wait here.
    assert bench.engine.load().tenants == {"": 1.0}
    bench.engine.cancel(0)
    bench.step()
    bench.engine.wake()
    bench.run()
    assert bench.tokens == {0: [], 1: expected(1, 100)}
    assert bench.engine.load().tenants == {}


def test_a_call_to_wake_reaches_an_engine_that_is_falling_asleep() -> None:
    bench = Bench(async_depth=4)
    bench.add(0, 0)
    for _ in range(10):
        bench.step()
    bench.engine.sleep()
    bench.step()
    assert not bench.engine.is_asleep
    bench.engine.wake()
    bench.run()
    assert bench.tokens[0] == expected(0, 0)
    assert bench.engine.load().num_sleeps == 0


def resident_bytes(folder: Path) -> int:
    """Bytes of files in the folder that are in this process's resident memory."""
    found = mappings_of(SMAPS.read_text())
    return sum(each.num_resident for each in found if each.path.startswith(str(folder)))


@dataclass
class ShortMemory:
    """Memory that another process has taken, for a while."""

    keeps_cache = True
    num_bytes = 100
    is_short = True

    def release(self) -> int:
        return 100

    def restore(self) -> None:
        if self.is_short:
            raise MemoryShort(100, 60)


def test_an_engine_stays_asleep_where_its_device_lacks_the_memory() -> None:
    memory = ShortMemory()
    executor = SimulatedExecutor(CONFIG, MODEL, SimulatedTiming())
    engine = Engine(CONFIG, executor, memory=memory, num_held_bytes=40)
    assert engine.load().num_held_bytes == 40
    engine.sleep()
    engine.step()
    engine.wake()
    engine.step()
    load = engine.load()
    assert (load.sleep_state, load.num_released_bytes, load.num_held_bytes) == ("asleep", 100, 0)
    assert load.sleep_problem == "the engine needs 100 bytes of its device, of which 60 are free"
    engine.sleep()
    load = engine.load()
    assert (load.sleep_state, load.sleep_problem) == ("asleep", "")
    memory.is_short = False
    engine.wake()
    load = engine.load()
    assert (load.sleep_state, load.num_released_bytes, load.sleep_problem) == ("awake", 0, "")
    assert load.num_held_bytes == 40


@pytest.mark.parametrize("seed", long_but(range(20), 0))
def test_no_token_changes_over_random_sleeps(seed: int) -> None:
    """Ten sleeps a seed."""
    random_source = random.Random(seed)
    bench = Bench(
        async_depth=random_source.randint(1, 4),
        num_host_blocks=random_source.choice([0, 6, 128]),
        num_blocks=random_source.choice([24, 60]),
    )
    wanted: dict[int, list[int]] = {}
    for _ in range(10):
        for _ in range(random_source.randint(1, 3)):
            key = len(wanted)
            first_token = 100 * random_source.randint(0, 3)
            bench.add(key, first_token)
            wanted[key] = expected(key, first_token)
        for _ in range(random_source.randint(0, 60)):
            bench.step()
        bench.engine.sleep()
        for _ in range(random_source.choice([0, 1, 2, 60])):
            bench.step()
        bench.engine.wake()
    bench.run()
    assert bench.tokens == wanted
    assert bench.engine.load().num_used_blocks == 0


def test_weights_of_a_cpu_leave_resident_memory_and_come_back(tmp_path: Path) -> None:
    weights = tmp_path / "weights.bin"
    weights.write_bytes(bytes(range(256)) * 4096 * 8)
    mapped = torch.from_file(str(weights), size=8 << 20, dtype=torch.uint8)
    total = int(mapped.sum())
    memory = MappedWeights([tmp_path])
    assert memory.num_bytes == resident_bytes(tmp_path) == 8 << 20
    assert memory.release() == 8 << 20
    assert resident_bytes(tmp_path) == 0
    memory.restore()
    assert resident_bytes(tmp_path) == 8 << 20
    assert int(mapped.sum()) == total
    # What was written to is not in the file, and has to stay.
    mapped[5] = 77
    assert memory.release() == 0
    assert int(mapped[5]) == 77


def test_mappings_are_read_with_their_paths() -> None:
    smaps = (
        "7f00-7f10 r--p 00000000 08:01 42     /models/a b/weights.bin\n"
        "Rss:   8 kB\nPrivate_Dirty:  8 kB\nAnonymous:  0 kB\nVmFlags: rd mr mw\n"
        "7f20-7f30 rw-p 00000000 00:00 0 \nRss:  4 kB\n"
        "7f40-7f50 rw-p 00000000 00:00 0      [heap]\nRss:  4 kB\n"
    )
    [found] = mappings_of(smaps)
    assert (found.path, found.num_resident, found.end - found.start) == (
        "/models/a b/weights.bin",
        8192,
        16,
    )


def test_a_cpu_goes_on_where_it_was(folder_of: Callable[[str], Path]) -> None:
    """Weights leave the process between two tokens; keys and values are host memory, and stay."""
    prompts = [list(range(3, 70)), list(range(9, 40))]
    engine = SmallEngine(folder_of("qwen3"), takes_turns=True)
    expected = engine.tokens(prompts, greedy(12))
    begun = [each[:5] for each in engine.tokens(prompts, greedy(5))]
    assert begun == [each[:5] for each in expected]
    for key, tokens in enumerate(prompts):
        engine.engine.add(
            NewRequest(key=100 + key, prompt_ids=tokens, output_ids=[], sampling=greedy(12))
        )
    driven = DrivenEngine(engine.engine)
    driven.tokens = {100: [], 101: []}
    for _ in range(4):
        driven.step()
    folder = folder_of("qwen3")
    num_resident = resident_bytes(folder)
    engine.engine.sleep()
    while not engine.engine.is_asleep:
        driven.step()
    load = engine.engine.load()
    # Rows of tokens that no prompt has were never read.
    file_bytes = (folder / WEIGHTS_NAME).stat().st_size
    assert 0.7 * file_bytes < num_resident == load.num_released_bytes
    assert num_resident <= load.num_releasable_bytes
    assert resident_bytes(folder) == 0
    engine.engine.wake()
    driven.run()
    assert [driven.tokens[100], driven.tokens[101]] == expected
    assert driven.cached[100] == 64
    engine.close()


def test_engines_that_have_adapters_or_ranks_may_not_sleep(
    folder_of: Callable[[str], Path],
) -> None:
    for option, value in (("adapter_memory", 1 << 20), ("tensor_parallel_size", 2)):
        options = ExecutorOptions(
            model_folder=folder_of("qwen3"), takes_turns=True, **{option: value}
        )
        with pytest.raises(ConfigError, match=f"takes_turns is True; allowed: False with {option}"):
            build_executor(options, lambda *progress: None)
