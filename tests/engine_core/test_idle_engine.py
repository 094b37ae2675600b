"""When an engine says that it has no work: whoever drives it sleeps then."""

from __future__ import annotations

import numpy as np

from headwater.engine_core.config import EngineConfig
from headwater.engine_core.engine import Engine
from headwater.engine_core.executors.simulated.executor import SimulatedExecutor
from headwater.engine_core.executors.simulated.model import SimulatedModel
from headwater.engine_core.request import NewRequest
from headwater.engine_core.sampling_params import SamplingParams
from headwater.engine_core.scheduling.table.masks import PATIENCE_SECONDS

CONFIG = EngineConfig(num_blocks=65, max_model_len=256, max_num_seqs=4, max_num_batched_tokens=64)


class Clock:
    """Passes the patience between two looks or three."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 0.6 * PATIENCE_SECONDS
        return self.now


def test_a_free_answer_goes_on_beside_one_whose_mask_never_comes() -> None:
    executor = SimulatedExecutor(CONFIG, SimulatedModel(vocab_size=1000))
    engine = Engine(CONFIG, executor, clock=Clock(), masks=np.full((1, 4, 32), -1, np.int32))
    for key, has_grammar in ((1, False), (2, True)):
        sampling = SamplingParams(seed=key, max_tokens=50)
        engine.add(
            NewRequest(
                key=key,
                prompt_ids=[1, 2, 3],
                output_ids=[],
                sampling=sampling,
                has_grammar=has_grammar,
            )
        )
    text = 0
    while engine.has_work():
        if (output := engine.step()) is not None:
            text += len(output.token_ids)
    assert text == 50
    assert engine.load().num_running == 1
