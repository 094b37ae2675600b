from __future__ import annotations

import numpy as np
import pytest
from typer import Typer
from typer.testing import CliRunner

from headwater.bench import kv_overhead


def test_engines_with_host_memory_and_with_pulls_are_compared_with_one_without() -> None:
    rows = kv_overhead.engine_overheads(8, 20, 0.01, runs=2)
    assert [row.what.partition(":")[0] for row in rows] == [
        "host memory",
        "pulls",
        "host memory and pulls",
    ]
    assert len({row.without_tier for row in rows}) == 1
    for row in rows:
        assert row.without_tier > 0
        assert row.with_tier > 0
        # Both figures are rounded to a tenth of a microsecond.
        assert abs(row.overhead_percent - (row.with_tier - row.without_tier) / 100) < 0.02


def test_the_shortest_round_of_each_step_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = iter([[[4, 1], [3, 2], [2, 9], [1, 9]], [[9, 1], [2, 2], [3, 3], [4, 5]]])
    monkeypatch.setattr(kv_overhead, "_step_seconds", lambda *_: np.array(next(rounds)) * 1e-6)
    rows = kv_overhead.engine_overheads(8, 2, 0.01, runs=2)
    assert [(row.without_tier, row.with_tier) for row in rows] == [
        (2.5, 2.0),
        (2.5, 2.5),
        (2.5, 3.0),
    ]


def test_both_take_turns_and_their_first_rounds_do_not_count() -> None:
    order = ""
    values = {"a": [1.0, 7.0, 5.0, 6.0], "b": [0.0, 3.0, 4.0, 2.0]}

    def send(name: str) -> float:
        nonlocal order
        order += name
        return values[name].pop(0)

    assert kv_overhead.in_turn(lambda: send("a"), lambda: send("b"), runs=3) == (5.0, 2.0)
    assert order == "abbaabba"


def test_what_cannot_be_measured_is_refused() -> None:
    app = Typer()
    app.command()(kv_overhead.main)
    for flags, output in (
        (["--model=gpt"], "model is 'gpt'; allowed: qwen3-0.6b"),
        (["--device=tpu"], "device is 'tpu'; allowed: cuda, cpu"),
        (["--step-ms=0"], "step-ms is 0.0; allowed: above 0"),
    ):
        done = CliRunner().invoke(app, flags)
        assert done.exit_code == 2
        assert output in " ".join(done.stderr.replace("│", " ").split())
