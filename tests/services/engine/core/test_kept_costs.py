"""Costs of steps are measured once for an engine on a machine, and again when they are old."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from headwater.engine_core.config import EngineConfig
from headwater.engine_core.drafting.step_costs import StepCosts
from headwater.engine_core.options import ModelFacts
from headwater.services.engine.core.kept_costs import KEPT_BUSY_SECONDS, KEPT_SECONDS, KeptCosts
from headwater.services.engine.core.kernel_cache import with_kernel_cache
from headwater.services.engine.core.variables import COSTS_VARIABLE
from headwater.services.engine.settings import EngineSettings

COSTS = StepCosts.measured([1, 16], [0.01, 0.02], 0.001)
FACTS = ModelFacts(dtype="bfloat16", kv_format="bfloat16", vocab_size=1000, numerics_id="one")
CONFIG = EngineConfig(num_blocks=100, max_model_len=1024, max_num_seqs=8, max_num_batched_tokens=64)
SETTINGS = EngineSettings(model_folder=Path("/model"))


def never() -> StepCosts:
    raise AssertionError("measured again")


def assert_equal(one: StepCosts, other: StepCosts) -> None:
    np.testing.assert_array_equal(one.sizes, other.sizes)
    np.testing.assert_array_equal(one.seconds, other.seconds)
    assert one.gap == other.gap


def test_costs_are_measured_at_the_first_start_and_read_at_the_next(tmp_path: Path) -> None:
    assert_equal(KeptCosts(tmp_path / "costs", "key").get("steps", lambda: COSTS), COSTS)
    assert_equal(KeptCosts(tmp_path / "costs", "key").get("steps", never), COSTS)


@pytest.mark.parametrize(("key", "what"), [("other", "steps"), ("key", "passes")])
def test_costs_are_those_of_one_engine_and_one_kind_of_step(
    tmp_path: Path, key: str, what: str
) -> None:
    KeptCosts(tmp_path, "key").get("steps", lambda: COSTS)
    with pytest.raises(AssertionError, match="measured again"):
        KeptCosts(tmp_path, key).get(what, never)


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b'{"sizes": [], "seconds": [], "gap": 0, "is_steady": true}', b'{"sizes": [1]}'],
)
def test_a_damaged_file_is_written_anew(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "key-steps.json").write_bytes(content)
    KeptCosts(tmp_path, "key").get("steps", lambda: COSTS)
    assert_equal(KeptCosts(tmp_path, "key").get("steps", never), COSTS)


@pytest.mark.parametrize(
    ("is_steady", "kept_seconds"), [(True, KEPT_SECONDS), (False, KEPT_BUSY_SECONDS)]
)
def test_old_costs_are_measured_again_those_of_a_busy_machine_sooner(
    tmp_path: Path, *, is_steady: bool, kept_seconds: float
) -> None:
    KeptCosts(tmp_path, "key").get("steps", lambda: replace(COSTS, is_steady=is_steady))
    written = (tmp_path / "key-steps.json").stat().st_mtime
    newer = StepCosts.measured([1], [0.5])
    assert_equal(
        KeptCosts(tmp_path, "key", clock=lambda: written + kept_seconds - 1).get("steps", never),
        COSTS,
    )
    assert_equal(
        KeptCosts(tmp_path, "key", clock=lambda: written + kept_seconds).get(
            "steps", lambda: newer
        ),
        newer,
    )


def test_an_engine_starts_where_its_costs_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert KeptCosts(tmp_path / "file" / "costs", "key").get("steps", lambda: COSTS) is COSTS


def test_costs_lie_beside_the_compiled_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(COSTS_VARIABLE)
    env = with_kernel_cache(os.environ | {"HEADWATER_CACHE": str(tmp_path)})
    KeptCosts.of_engine(env, SETTINGS, CONFIG, FACTS).get("steps", lambda: COSTS)
    assert env[COSTS_VARIABLE] == str(tmp_path / "kernels/step-costs")
    assert len(list((tmp_path / "kernels/step-costs").iterdir())) == 1


@pytest.mark.parametrize(
    "changed",
    [
        lambda of: of(SETTINGS, CONFIG, replace(FACTS, numerics_id="two")),
        lambda of: of(replace(SETTINGS, threads=3), CONFIG, FACTS),
        lambda of: of(replace(SETTINGS, draft_model=Path("/small")), CONFIG, FACTS),
        lambda of: of(SETTINGS, replace(CONFIG, max_num_seqs=9), FACTS),
        # Its steps take what the settings say, whatever they were before.
        lambda of: of(replace(SETTINGS, executor="simulated"), CONFIG, FACTS),
    ],
    ids=["numerics", "threads", "draft model", "requests at once", "simulated"],
)
def test_another_engine_measures_its_own(
    tmp_path: Path, changed: Callable[[Callable[..., KeptCosts]], KeptCosts]
) -> None:
    def of(settings: EngineSettings, config: EngineConfig, facts: ModelFacts) -> KeptCosts:
        return KeptCosts.of_engine({COSTS_VARIABLE: str(tmp_path)}, settings, config, facts)

    of(SETTINGS, CONFIG, FACTS).get("steps", lambda: COSTS)
    assert_equal(of(SETTINGS, CONFIG, FACTS).get("steps", never), COSTS)
    with pytest.raises(AssertionError, match="measured again"):
        changed(of).get("steps", never)
