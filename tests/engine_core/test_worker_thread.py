"""An error in a thread that others wait for ends the process, and is told."""

from __future__ import annotations

import subprocess
import sys

LANE = """
import time
from headwater.engine_core.system.lanes import ThreadLane

ThreadLane("kv-direct").submit(lambda: 1 // 0)
time.sleep(600)
"""


def test_an_error_in_a_thread_that_others_wait_for_ends_the_process() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", LANE], capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode == 1
    assert "ZeroDivisionError" in ended.stderr
