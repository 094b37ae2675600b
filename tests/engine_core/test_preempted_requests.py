"""What becomes of preempted requests' keys and values: brought back from a tier where that is
sooner than computing."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from headwater.engine_core.config import EngineConfig
from headwater.engine_core.engine import Engine
from headwater.engine_core.executors.simulated.executor import SimulatedExecutor, SimulatedTiming
from headwater.engine_core.executors.simulated.model import SimulatedModel, expected_tokens
from headwater.engine_core.kv.block_record import BlockSeal
from headwater.engine_core.kv.disk.block_files import BlockFiles
from headwater.engine_core.kv.disk.disk_blocks import DiskBlocks
from headwater.engine_core.kv.read_costs import ReadCosts
from headwater.engine_core.request import NewRequest
from headwater.engine_core.sampling_params import SamplingParams
from headwater.engine_core.step_output import EngineLoad
from headwater.engine_core.waits_for import WaitsFor
from tests.engine_core.manual_lane import ManualLane

BLOCK_SIZE = 16
MODEL = SimulatedModel(vocab_size=1000)
PREFILL_SECONDS = 0.001
"""Of a token: 16 ms a block."""
SAMPLING = SamplingParams(max_tokens=60, seed=3)
PROMPTS = [[(first + 7 * i) % 1000 for i in range(50)] for first in (0, 111, 222, 333, 444, 555)]


@dataclass
class Clock:
    now: float = 0.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@dataclass
class Bench:
    """An engine whose cache holds a part of what six requests need at once."""

    num_host_blocks: int = 0
    disk: Path | None = None
    seconds_per_block: float = 0.0
    """Of either tier."""
    tokens: dict[int, list[int]] = field(default_factory=dict)

    def run(self) -> EngineLoad:
        clock = Clock()
        config = EngineConfig(
            block_size=BLOCK_SIZE,
            num_blocks=22,
            num_host_blocks=self.num_host_blocks,
            num_staged_blocks=0 if self.disk is None else 64,
            max_model_len=256,
            max_num_seqs=8,
            max_num_batched_tokens=64,
        )
        timing = SimulatedTiming(step_seconds=0.005, seconds_per_prefill_token=PREFILL_SECONDS)
        executor = SimulatedExecutor(
            config, MODEL, timing, verify_every=1, clock=lambda: clock.now, sleep=clock.sleep
        )
        files = (
            None
            if self.disk is None
            else BlockFiles.open(self.disk, b"k" * 16, 1 << 20, BlockSeal())
        )
        if executor.swapper is not None and self.disk is None:
            executor.swapper.seconds_per_block = self.seconds_per_block
        engine = Engine(config, executor, clock=lambda: clock.now, disk_files=files)
        self._run(engine, engine._tiers.disk)
        load = engine.load()
        assert load.num_used_blocks == 0
        engine.close()
        return load

    def _run(self, engine: Engine, disk: DiskBlocks | None) -> None:
        writes = ManualLane()
        reads = ManualLane()
        if disk is not None:
            disk._jobs.writes = writes
            disk._jobs.reads = reads
            disk._is_scanning = False
            disk._costs = FixedCosts(self.seconds_per_block)
        for key, prompt_ids in enumerate(PROMPTS):
            self.tokens[key] = []
            engine.add(NewRequest(key=key, prompt_ids=prompt_ids, output_ids=[], sampling=SAMPLING))
        for _ in range(20_000):
            if engine.waits_for is WaitsFor.WORK:
                return
            writes.run()
            reads.run()
            if (output := engine.step()) is None:
                continue
            tokens = iter(output.token_ids)
            for key, count in zip(output.keys, output.num_tokens, strict=True):
                self.tokens[key] += [next(tokens) for _ in range(count)]
        raise AssertionError("it does not end")


class FixedCosts(ReadCosts):
    """A disk of a known speed."""

    def __init__(self, seconds_per_block: float) -> None:
        super().__init__(lambda: 0.0)
        self._seconds = seconds_per_block

    @property
    def seconds_per_block(self) -> float:
        return self._seconds


def check_tokens(bench: Bench) -> None:
    for key, prompt_ids in enumerate(PROMPTS):
        assert bench.tokens[key] == expected_tokens(MODEL, prompt_ids, SAMPLING)


def test_without_a_tier_they_are_computed_again() -> None:
    bench = Bench()
    load = bench.run()
    check_tokens(bench)
    assert load.num_preemptions > 0
    assert (load.num_resumed_loaded, load.num_resumed_computed > 0) == (0, True)


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_preempted_requests_are_loaded_from_a_tier_that_is_faster_than_computing(
    tier: str, tmp_path: Path
) -> None:
    bench = Bench(seconds_per_block=0.004)
    bench.num_host_blocks, bench.disk = (100, None) if tier == "host" else (0, tmp_path)
    load = bench.run()
    check_tokens(bench)
    assert load.num_preemptions > 0
    assert load.num_resumed_loaded > load.num_resumed_computed > 0, (
        "only what fills no block is computed"
    )
    assert load.num_resumed_computed <= load.num_preemptions * 2 * BLOCK_SIZE


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_preempted_requests_are_computed_where_the_tier_is_slower(
    tier: str, tmp_path: Path
) -> None:
    bench = Bench(seconds_per_block=0.020)
    bench.num_host_blocks, bench.disk = (100, None) if tier == "host" else (0, tmp_path)
    load = bench.run()
    check_tokens(bench)
    assert load.num_preemptions > 0
    assert (load.num_resumed_loaded, load.num_swapped_in, load.hits_by_tier) == (0, 0, {})
    assert load.num_resumed_computed > 0
