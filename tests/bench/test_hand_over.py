from __future__ import annotations

import json
import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from headwater.bench.hand_over import is_good, main
from headwater.bench.sse_client import Outcome

LATE = [0.01] * 98 + [0.05] * 2
"""Gaps of which more than one in a hundred is too long."""


@pytest.mark.parametrize(
    ("first_at", "gaps", "error", "expected"),
    [
        (0.9, [0.02] * 5, "", True),
        (0.9, [], "", True),
        (1.1, [0.02] * 5, "", False),
        (0.9, LATE, "", False),
        (0.9, [*LATE[:98], 0.01, 0.01], "", True),
        (0.5, [0.02], "refused", False),
    ],
)
def test_a_good_request_keeps_both_objectives(
    first_at: float, gaps: list[float], error: str, expected: bool
) -> None:
    assert is_good(Outcome(sent_at=0.0, first_at=first_at, gaps=gaps, error=error)) is expected


@pytest.mark.parametrize(
    ("flag", "allowed"),
    [("--part=push", "allowed: pull, mixes"), ("--mix=1/1", "allowed: 8192/16")],
)
def test_what_cannot_be_measured_is_refused_before_anything_starts(flag: str, allowed: str) -> None:
    app = typer.Typer()
    app.command()(main)
    result = CliRunner().invoke(app, [flag], env={"COLUMNS": "300"})
    assert result.exit_code == 2
    assert allowed in result.output


@pytest.mark.long
def test_both_parts_run_on_a_cpu() -> None:
    command = [
        sys.executable,
        "-m",
        "headwater.bench.hand_over",
        "--dry-run",
        "--runs=1",
        "--up=--device=cpu",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    pull, together, split = map(json.loads, done.stdout.splitlines())
    assert pull["tokens"] == 256
    assert (together["engines"], split["engines"]) == ("together", "split")
    assert together["failed"] == split["failed"] == 0
    assert together["pulled"] == 0 < split["pulled_directly"]
