from __future__ import annotations

import logging
from typing import Any

import pytest

from headwater.engine_core.config import EngineConfig
from headwater.engine_core.executors.simulated import SimulatedExecutor, SimulatedModel, SimulatedTiming
from headwater.services.engine.settings import EngineSettings
from headwater.services.engine.speculation import build_speculator, drafters_of

CONFIG = EngineConfig(num_blocks=100, max_model_len=1024, max_num_seqs=8, max_num_batched_tokens=64)


@pytest.mark.parametrize(
    ("asked", "sentences"),
    [
        ({"gemv": True}, ["speculation is off: with --gemv a token's bits depend on the step that computes it"]),
        ({"gemv": True, "speculation": "off"}, []),
        ({"speculation": "off"}, []),
    ],
    ids=str,
)
def test_an_engine_that_drafts_nothing_unasked_says_why_once(
    asked: dict[str, Any], sentences: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    settings = EngineSettings(executor="simulated", **asked)
    executor = SimulatedExecutor(CONFIG, SimulatedModel(vocab_size=1000), SimulatedTiming())
    with caplog.at_level(logging.INFO):
        assert build_speculator(settings, CONFIG, executor, 1000) is None
    assert caplog.messages == sentences


def test_a_request_may_ask_for_the_drafters_that_its_engine_has() -> None:
    assert drafters_of(EngineSettings(executor="simulated", drafters=("suffix",))) == ("suffix",)
    assert drafters_of(EngineSettings(executor="simulated", speculation="off")) == ()
    assert drafters_of(EngineSettings(executor="simulated", gemv=True)) == ()
