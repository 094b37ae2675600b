"""The order of a step's parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headwater.engine_core.executors.step_executor import StepExecutor
from headwater.engine_core.sampling_params import SamplingParams
from tests.engine_core.small_models import SmallEngine, convert, random_checkpoint

STEP = (
    ("tiers", "precede"),
    ("exit", "precede"),
    ("caches", "copy"),
    ("entry", "send"),
    ("drafter", "draft"),
    ("entry", "take"),
    ("layers", "hidden"),
    ("exit", "give"),
    ("drafter", "see"),
    ("device", "end"),
)


def test_a_step_sends_its_words_before_drafts_and_samples_before_what_drafts_sees_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    random_checkpoint("qwen3", tmp_path / "hf")
    engine = SmallEngine(convert(tmp_path / "hf", tmp_path / "ours"))
    executor = engine.executor
    assert isinstance(executor, StepExecutor)
    called = list[tuple[str, str]]()

    def note(part: str, verb: str) -> None:
        found = getattr(executor, f"_{part}")
        call = getattr(found, verb)

        def noted(*given: Any) -> Any:
            called.append((part, verb))
            return call(*given)

        monkeypatch.setattr(found, verb, noted)

    for part, verb in STEP:
        note(part, verb)
    engine.answer([[3, 5, 8]], SamplingParams(temperature=0.0, max_tokens=4))
    engine.close()
    assert len(called) >= 4 * len(STEP)
    assert called == list(STEP) * (len(called) // len(STEP))
