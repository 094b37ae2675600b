from __future__ import annotations

import json
from pathlib import Path

import pytest

from headwater.bench import engine_load
from headwater.bench.engine_load import closed_loop, measure, requests
from headwater.bench.offline import Bench
from headwater.bench.workloads import TINY, ClusterLoad
from headwater.engine_core.engine import Engine
from headwater.engine_core.step_output import EngineLoad, StepOutput

LOAD = ClusterLoad(model="tiny", concurrency=3, num_requests=8, prompt_len=5, output_len=4)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    return Bench(tmp_path, {"device": "cpu", "load_format": "dummy", "num_threads": 1})


def test_so_many_requests_run_at_any_time_and_all_are_answered(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[StepOutput] = []
    loads: list[EngineLoad] = []
    step = Engine.step

    def received(engine: Engine) -> StepOutput | None:
        if (output := step(engine)) is not None:
            sent.append(output)
            loads.append(engine.load())
        return output

    monkeypatch.setattr(Engine, "step", received)
    assert closed_loop(bench, requests(bench, LOAD, LOAD.num_requests), LOAD.concurrency) > 0
    assert sum(len(output.token_ids) for output in sent) == LOAD.num_requests * LOAD.output_len
    assert max(load.num_running + load.num_waiting for load in loads) == LOAD.concurrency
    assert bench.engine.load().num_running == 0


def test_the_rate_is_that_of_the_best_run_after_the_warm_up(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = iter([0.5, 4.0, 2.0, 3.0])
    monkeypatch.setattr(
        engine_load, "closed_loop", lambda bench, requests, concurrency: next(seconds)
    )
    assert measure(bench, LOAD, runs=3) == {"output_tokens_per_s": 16.0, "seconds": 2.0}
