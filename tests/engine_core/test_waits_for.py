"""An engine says what its next step waits for, and a call of the engine ends the wait. Waits for
the device and blocks are in `test_lent_blocks.py`, for time in `test_prefetches.py`."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from headwater.engine_core.config import EngineConfig
from headwater.engine_core.engine import Engine
from headwater.engine_core.executors.simulated.executor import SimulatedExecutor, SimulatedTiming
from headwater.engine_core.executors.simulated.model import SimulatedModel
from headwater.engine_core.request import NewRequest
from headwater.engine_core.sampling_params import SamplingParams
from headwater.engine_core.scheduling.table.masks import PATIENCE_SECONDS
from headwater.engine_core.waits_for import WaitsFor

CONFIG = EngineConfig(num_blocks=20, max_model_len=128, async_depth=1)
STEP_SECONDS = 1.0


class Bench:
    """An engine on a device that takes a second for each step."""

    def __init__(self) -> None:
        self.now = 0.0
        executor = SimulatedExecutor(
            CONFIG,
            SimulatedModel(vocab_size=64),
            SimulatedTiming(step_seconds=STEP_SECONDS),
            clock=lambda: self.now,
            sleep=lambda seconds: None,
        )
        masks = np.full((1, CONFIG.num_rows, 2), -1, np.int32)
        self.engine = Engine(CONFIG, executor, clock=lambda: self.now, masks=masks)

    def add(self, key: int, *, has_grammar: bool = False) -> None:
        sampling = SamplingParams(max_tokens=2)
        new = NewRequest(key=key, prompt_ids=[3, 4, 5], output_ids=[], sampling=sampling)
        self.engine.add(replace(new, has_grammar=has_grammar))

    def turn(self) -> WaitsFor:
        self.engine.launch()
        waits_for = self.engine.settle()
        self.engine.take_output()
        assert waits_for is self.engine.waits_for
        return waits_for


def test_an_engine_waits_for_work_until_a_request_comes_and_again_once_it_has_ended() -> None:
    bench = Bench()
    assert bench.engine.waits_for is WaitsFor.WORK
    bench.add(1)
    assert bench.engine.waits_for is WaitsFor.NOTHING
    seen = []
    while bench.engine.has_work():
        seen.append(bench.turn())
        bench.now += STEP_SECONDS
    assert seen[-1] is WaitsFor.WORK
    assert set(seen) == {WaitsFor.NOTHING, WaitsFor.WORK}


def test_an_engine_waits_a_moment_for_masks_and_then_has_nothing_to_do_without_them() -> None:
    bench = Bench()
    bench.add(1, has_grammar=True)
    bench.turn()
    bench.now += STEP_SECONDS
    while (waits_for := bench.turn()) is WaitsFor.NOTHING:
        pass
    assert waits_for is WaitsFor.MASKS
    bench.now += 2 * PATIENCE_SECONDS
    assert bench.turn() is WaitsFor.WORK, "masks come as calls"
