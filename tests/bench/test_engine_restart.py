"""Pauses of answers whose engine was killed."""

from __future__ import annotations

import pytest
import typer
from typer.testing import CliRunner

from headwater.bench.engine_restart import Answer, main


@pytest.mark.parametrize(
    ("arrivals", "pause"),
    [
        ([9.0, 9.5], 0.0),
        ([9.0, 10.1, 10.2, 12.0, 12.5], 1.8),
        ([9.0, 11.5, 12.0], 1.5),
    ],
    ids=["there before", "some pieces were on their way", "the next piece waited"],
)
def test_a_pause_is_the_longest_gap_behind_the_kill(arrivals: list[float], pause: float) -> None:
    assert Answer([""] * len(arrivals), arrivals).pause(killed_at=10.0) == pytest.approx(pause)


@pytest.mark.parametrize("flag", ["--streams", "--rounds"])
def test_no_answers_and_no_deaths_are_refused_before_a_cluster_starts(flag: str) -> None:
    app = typer.Typer()
    app.command()(main)
    done = CliRunner().invoke(app, [flag, "0"])
    assert done.exit_code == 2
    assert f"Invalid value for '{flag}'" in done.stderr
