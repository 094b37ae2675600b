"""An error in a thread that others wait for ends the process, and is told."""

from __future__ import annotations

import subprocess
import sys

import pytest

LANE = """
import time
from headwater.engine_core.system.lanes import ThreadLane

ThreadLane("kv-direct").submit(lambda: 1 // 0)
time.sleep(60)
"""
STAGE_RELAY = """
import time
from headwater.engine_core.executors.ranks.stage_relay import _run_thread

_run_thread(lambda: 1 // 0)
time.sleep(60)
"""


@pytest.mark.parametrize(
    "program", [LANE, STAGE_RELAY], ids=["job of a lane", "message to another stage"]
)
def test_an_error_in_a_thread_that_others_wait_for_ends_the_process(program: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode == 1
    assert "ZeroDivisionError" in ended.stderr
