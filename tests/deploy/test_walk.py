"""The steps of deploy/walk.sh that run tests."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STEPS = re.findall(
    r'^(\w+)\(\) \{ tested "[^"]*" (.*); \}$', (ROOT / "deploy/walk.sh").read_text(), re.M
)


@pytest.mark.long
@pytest.mark.parametrize(("step", "arguments"), STEPS, ids=[step for step, _ in STEPS])
def test_a_step_that_runs_tests_finds_some(step: str, arguments: str) -> None:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", *shlex.split(arguments)]
    found = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, cwd=ROOT
    )
    assert found.returncode == 0, found.stdout
    assert "::" in found.stdout


def test_the_steps_are_those_of_the_chart_and_the_console() -> None:
    assert [step for step, _ in STEPS] == ["chart", "console"]
