"""Tests that took longest run first."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

TESTS = """
import pytest

@pytest.mark.parametrize("name", ["short", "long", "unknown", "longest"])
def test_it(name):
    pass
"""
SECONDS = {"longest": 60.0, "long": 20.5, "short": 1.0}


def test_tests_run_by_their_seconds_and_unknown_ones_last(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(TESTS)
    seconds = {f"test_it.py::test_it[{name}]": each for name, each in SECONDS.items()}
    (tmp_path / "seconds.json").write_text(json.dumps(seconds))
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider"]
    command += ["-p", "headwater.bench.pytest_order", "--seconds-file=seconds.json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    names = [
        line.split("[")[1].split("]")[0] for line in done.stdout.splitlines() if "PASS" in line
    ]
    assert names == ["longest", "long", "short", "unknown"]
