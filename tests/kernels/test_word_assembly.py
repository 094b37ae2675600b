"""Checks of the assembly of kernels that exchange over host memory; no GPU is needed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest

from tests.kernels import word_assembly

pytestmark = pytest.mark.long
ATOMIC = re.compile(r"\b(?:atom|red|multimem)\.[\w.]+")
WAITS = {"FLAGGED": 0, "ONE_SHOT": 1, "TWO_SHOTS": 2, "join": 1, "best": 1}
WAITS |= {"send stream": 1, "receive stream": 1, "receive tokens": 1, "receive ends": 1}
SAYS = {"ONE_SHOT": 3, "TWO_SHOTS": 6, "join": 3, "best": 3}
SAYS |= dict.fromkeys(("send stream", "receive stream", "send tokens", "send ends"), 1)


def test_kernels_over_host_memory_have_no_atomic_operation() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", word_assembly.__name__]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    programs: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    assert len(programs) == 11
    for name, ptx in programs.items():
        assert ATOMIC.findall(ptx) == [], name
        assert ptx.count("ld.acquire.sys.global.b32") == WAITS.get(name, 0), name
        # A fence before the words of a meeting; one word for each rank, or for the other stage.
        assert ptx.count("st.relaxed.sys.global.b32") == SAYS.get(name, 0), name
        assert bool(ptx.count("fence.acq_rel.sys")) == (name in SAYS), name
        is_read = name.startswith(("send", "FLAGGED"))
        assert is_read or "ld.volatile.global" in ptx, name
    assert "st.global.wt.b32" in programs["FLAGGED"]
