from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from headwater.engine_core.config import EngineConfig
from headwater.engine_core.executors.simulated.executor import SimulatedExecutor, SimulatedTiming
from headwater.engine_core.executors.simulated.model import SimulatedModel
from headwater.engine_core.options import ModelFacts
from headwater.services.engine.core.speculation import build_speculator, drafters_of
from headwater.services.engine.settings import EngineSettings
from headwater.services.runtime.speculation import DRAFTERS, NAMES
from tests.engine_core.test_drafters_at_random import SPECULATIONS

DOCS = Path(__file__).parents[4] / "docs" / "speculation.md"
FACTS = ModelFacts(
    dtype="simulated", kv_format="simulated", vocab_size=1000, numerics_id="simulated"
)
CONFIG = EngineConfig(num_blocks=100, max_model_len=1024, max_num_seqs=8, max_num_batched_tokens=64)


def test_an_engine_has_a_speculator_unless_speculation_is_off() -> None:
    executor = SimulatedExecutor(CONFIG, SimulatedModel(vocab_size=1000), SimulatedTiming())
    usual = EngineSettings(executor="simulated")
    reported = EngineSettings(executor="simulated", speculation="off")
    assert build_speculator(usual, CONFIG, executor, FACTS) is not None
    assert build_speculator(reported, CONFIG, executor, FACTS) is None


@pytest.mark.parametrize("name", DRAFTERS)
def test_an_engine_builds_every_drafter_that_its_settings_may_name(name: str) -> None:
    executor = SimulatedExecutor(CONFIG, SimulatedModel(vocab_size=1000), SimulatedTiming())
    settings = EngineSettings(executor="simulated", drafters=(name,))
    assert build_speculator(settings, CONFIG, executor, FACTS) is not None


def test_every_drafter_is_tried_at_random_and_documented() -> None:
    tried = {each.drafter for each in SPECULATIONS}
    assert {*DRAFTERS} <= tried, (
        "add the drafter to SPECULATIONS, and to those drawn, of test_drafters_at_random.py"
    )
    text = DOCS.read_text()
    assert not {name for name in NAMES if f"| `{name}` |" not in text}, (
        "add a row to docs/speculation.md"
    )


def test_a_request_may_ask_for_the_drafters_that_its_engine_has() -> None:
    only = EngineSettings(executor="simulated", drafters=("suffix",))
    assert drafters_of(only, FACTS) == ("suffix",)
    assert drafters_of(only, replace(FACTS, has_mtp=True)) == ("suffix", "mtp")
    assert drafters_of(EngineSettings(executor="simulated", speculation="off"), FACTS) == ()
