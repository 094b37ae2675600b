"""The log of a stage, where it cannot be written."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

FULL = Path("/dev/full")
LOGS = """
import structlog
from headwater.services.runtime.process import configure_logging
configure_logging("gateway")
for _ in range(1000):
    structlog.get_logger().info("a line", text="a" * 100)
print("went on")
"""


@pytest.mark.skipif(not FULL.exists(), reason="the system has no device that is always full")
def test_a_full_disk_costs_lines_of_the_log_and_nothing_else() -> None:
    with FULL.open("wb") as full:
        stage = subprocess.run(
            [sys.executable, "-c", LOGS],
            stdout=subprocess.PIPE,
            stderr=full,
            timeout=60,
            check=False,
        )
    assert stage.stdout == b"went on\n"


def test_a_reader_that_is_gone_costs_lines_of_the_log_and_nothing_else() -> None:
    stage = subprocess.Popen(
        [sys.executable, "-c", LOGS], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    with stage:
        assert stage.stderr is not None
        stage.stderr.close()
        assert stage.stdout is not None
        assert stage.stdout.read() == b"went on\n"
