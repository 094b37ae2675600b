"""Copies of a rank that end later than they are launched are counted though the rank is told
nothing more."""

from __future__ import annotations

import subprocess
import sys
from collections import deque

import numpy as np

from headwater.engine_core.executor import Int32Array, SwapPlan
from headwater.engine_core.executors.simulated.swapper import SimulatedSwapper
from headwater.engine_core.executors.tiers.copy_thread import CopyThread
from tests.polling import holds_within

NONE = np.empty(0, np.int32)
BROKEN = """
import time
import numpy as np
from headwater.engine_core.executor import SwapPlan
from headwater.engine_core.executors.tiers.copy_thread import CopyThread

class Broken:
    num_saved = property(lambda self: 1 // 0)

none, one = np.empty(0, np.int32), np.ones(1, np.int32)
CopyThread(Broken(), print).add(SwapPlan(out_blocks=one, out_slots=one, in_slots=none, in_blocks=none))
time.sleep(600)
"""


def words(*values: int) -> Int32Array:
    return np.array(values, np.int32)


def test_copies_are_noted_as_they_end_while_no_plan_comes() -> None:
    noted: deque[tuple[int, int]] = deque(maxlen=1000)
    kv_blocks = np.arange(32, dtype=np.uint64).reshape(8, 4)
    swapper = SimulatedSwapper(kv_blocks, 4, late_polls=3)
    later = CopyThread(swapper, lambda *counts: noted.append(counts))
    save = SwapPlan(out_blocks=words(1, 2), out_slots=words(0, 3), in_slots=NONE, in_blocks=NONE)
    load = SwapPlan(out_blocks=NONE, out_slots=NONE, in_slots=words(3, 0), in_blocks=words(5, 6))
    for plan in (save, load):
        swapper.swap(plan)
        later.add(plan)
    assert holds_within(lambda: bool(noted) and noted[-1] == (2, 2), 60.0)
    # One block after the other, each of them late.
    assert {num_loaded for _, num_loaded in noted} == {0, 1, 2}
    assert kv_blocks[5].tolist() == [8, 9, 10, 11]
    swapper.swap(save)
    later.add(save)
    assert holds_within(lambda: noted[-1] == (4, 2), 60.0)


def test_copies_that_cannot_be_counted_end_the_process() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", BROKEN], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 1
    assert "ZeroDivisionError" in ended.stderr
