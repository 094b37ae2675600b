from __future__ import annotations

from headwater.engine_core.config import EngineConfig
from headwater.engine_core.executors.simulated import SimulatedExecutor, SimulatedTiming
from headwater.engine_core.executors.simulated_model import SimulatedModel
from headwater.engine_core.options import ModelFacts
from headwater.services.engine.settings import EngineSettings
from headwater.services.engine.speculation import build_speculator, drafters_of

FACTS = ModelFacts(dtype="simulated", kv_format="simulated", vocab_size=1000, numerics_id="simulated")
CONFIG = EngineConfig(num_blocks=100, max_model_len=1024, max_num_seqs=8, max_num_batched_tokens=64)


def test_an_engine_has_a_speculator_unless_it_is_told_not_to() -> None:
    executor = SimulatedExecutor(CONFIG, SimulatedModel(vocab_size=1000), SimulatedTiming())
    usual, told = EngineSettings(executor="simulated"), EngineSettings(executor="simulated", speculation="off")
    assert build_speculator(usual, CONFIG, executor, FACTS) is not None
    assert build_speculator(told, CONFIG, executor, FACTS) is None


def test_a_request_may_ask_for_the_drafters_that_its_engine_has() -> None:
    assert drafters_of(EngineSettings(executor="simulated", drafters=("suffix",))) == ("suffix",)
    assert drafters_of(EngineSettings(executor="simulated", speculation="off")) == ()
