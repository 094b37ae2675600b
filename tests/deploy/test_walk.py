"""The steps of deploy/walk.sh that run tests."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.deploy.docker_launcher import missing_for
from tests.free_ports import free_port

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


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("step", ["readme", "tutorial"])
def test_every_command_of_the_page_works_in_an_empty_container(step: str, tmp_path: Path) -> None:
    if missing := missing_for((os.environ.get("WALK_IMAGE", "python:3.11-slim"),)):
        pytest.skip(missing)
    # The step has this port and the one behind it.
    env = os.environ | {"PORT": str(free_port()), "WALK_SUMMARY": str(tmp_path / "summary")}
    walked = subprocess.run(
        [ROOT / "deploy/walk.sh", step],
        env=env,
        capture_output=True,
        text=True,
        timeout=3500,
        check=False,
    )
    assert walked.returncode == 0, walked.stdout[-4000:] + walked.stderr[-2000:]
    summary = (tmp_path / "summary").read_text()
    print(summary)
    assert "in empty containers" in summary
    assert re.search(rf"^{step} +passed", summary, re.M)


def test_the_steps_are_those_of_the_chart_and_the_console() -> None:
    assert [step for step, _ in STEPS] == ["chart", "console"]
