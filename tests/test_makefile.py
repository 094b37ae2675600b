"""The verbs of the Makefile: which environment each of them touches."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SERVING = "serving-environment"
TESTING = "testing-environment"


def commands(verb: str) -> str:
    """What a verb would run on a fresh clone."""
    command = ["make", "--dry-run", "--always-make", verb, f"VENV={SERVING}", f"DEV_VENV={TESTING}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout


pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is missing")


@pytest.mark.parametrize("verb", ["check", "test", "test-long", "fmt", "proto", "bench"])
def test_tests_and_checks_leave_the_environment_that_serves_alone(verb: str) -> None:
    reported = commands(verb)
    assert SERVING not in reported
    assert f"-m venv {TESTING}" in reported


def test_what_serves_is_installed_without_what_tests_need() -> None:
    reported = commands("up")
    assert TESTING not in reported
    assert f"deploy/install.sh {SERVING}/bin/python up" in reported


def test_only_long_tests_bring_the_clients_that_they_run() -> None:
    assert "bin/python clients" in commands("test-long")
    assert "bin/python clients" not in commands("test") + commands("check")
