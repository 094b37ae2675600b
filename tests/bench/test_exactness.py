from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from headwater.bench.exactness_shapes import TINY
from headwater.bench.exactness_trial import Trial
from headwater.bench.stress import Stress
from headwater.engine_core.executor import StepPlan, StepResult
from headwater.engine_core.executors.step_executor import StepExecutor
from tests.engine_core.small_models import SmallEngine

COMMAND = [sys.executable, "-m", "headwater.bench.exactness", "--device=cpu", "--json"]


@pytest.fixture
def engine(tmp_path: Path) -> SmallEngine:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    return SmallEngine(tmp_path, load_format="dummy", block_size=16)


def trial(engine: SmallEngine) -> Trial:
    stress = Stress(engine.executor, is_on=False, seed=0)
    return Trial(engine.executor, engine.config, TINY["vocab_size"], 0, stress)


@pytest.mark.long
def test_an_engine_whose_bits_do_not_depend_on_company_shows_no_difference(
    engine: SmallEngine,
) -> None:
    compared = trial(engine)
    assert list(compared.rounds(6)) == [[]]
    assert (compared.num_rounds > 0, compared.num_compared) == (True, 18)


@pytest.mark.long
def test_a_token_that_company_changes_is_found(
    engine: SmallEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    retire = StepExecutor.retire
    rows = dict[int, int]()

    def submit(self: StepExecutor, plan: StepPlan, submit=StepExecutor.submit) -> int:  # type: ignore[no-untyped-def]
        handle: int = submit(self, plan)
        rows[handle] = len(plan.rows)
        return handle

    def wrong_in_company(self: StepExecutor, handle: int) -> StepResult:
        result = retire(self, handle)
        return replace(result, token_ids=result.token_ids ^ 1) if rows[handle] > 4 else result

    monkeypatch.setattr(StepExecutor, "submit", submit)
    monkeypatch.setattr(StepExecutor, "retire", wrong_in_company)
    (differences,) = trial(engine).rounds(6)
    assert any(each.company == "together" and each.what.startswith("token") for each in differences)


@pytest.mark.long
def test_keys_that_company_changes_are_found_where_no_token_does(
    engine: SmallEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit = StepExecutor.submit
    cache = engine.executor.kv_caches[0]

    def a_bit_more(self: StepExecutor, plan: StepPlan) -> int:
        handle = submit(self, plan)
        if len(plan.rows) > 1 and plan.block_ids.size:
            # Of the least that a number can grow by.
            cache[1, 0, int(plan.block_ids[0])] *= 1 + torch.finfo(cache.dtype).eps
        return handle

    monkeypatch.setattr(StepExecutor, "submit", a_bit_more)
    (differences,) = trial(engine).rounds(6)
    assert any("layer 1" in each.what for each in differences)


@pytest.mark.long
def test_the_program_reports_each_engine_and_requests_without_an_answer() -> None:
    whole = subprocess.run(
        [*COMMAND, "--requests=4", "--processes=2", "--shape=demo"],
        capture_output=True,
        text=True,
        check=False,
    )
    report = json.loads(whole.stdout.splitlines()[-1])
    assert whole.returncode == 0, whole.stderr
    assert (report["requests"], report["compared"], report["different"], report["missing"]) == (
        4,
        12,
        0,
        [],
    )
    late = subprocess.run(
        [*COMMAND, "--requests=4", "--limit=0", "--shape=demo"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert late.returncode == 1
    assert len(json.loads(late.stdout.splitlines()[-1])["missing"]) == 4


@pytest.mark.long
def test_an_unknown_shape_is_refused_by_name() -> None:
    done = subprocess.run([*COMMAND, "--shape=round"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "'round'" in done.stderr
