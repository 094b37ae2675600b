from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROBE = """
import sys, threading
from headwater.kernels.launch import compilers_ahead
compilers_ahead.hash_triton()
compilers_ahead.start_numba()
for thread in threading.enumerate()[1:]:
    thread.join()
from triton.runtime.cache import triton_key
assert triton_key.cache_info().currsize == 1
assert compilers_ahead.NUMBA_START in sys.modules
"""


def test_a_process_has_the_hash_of_triton_and_a_started_numba_afterwards() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROBE], check=False, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_process_that_imports_the_hash_of_triton_has_it_when_its_threads_have_ended() -> None:
    probe = "import threading, headwater.kernels.launch.triton_hash\n"
    probe += (
        "for thread in threading.enumerate()[1:]:\n    assert not thread.daemon\n    "
        "thread.join()\n"
    )
    probe += (
        "from triton.runtime.cache import triton_key\nassert "
        "triton_key.cache_info().currsize == 1\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", probe], check=False, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.long
def test_what_drafts_on_the_host_is_compiled_by_processes_beside_an_engine(tmp_path: Path) -> None:
    probe = PROBE + (
        "from headwater.kernels.cpu import drafts, suffix_match\n"
        "for function, maker in (*drafts.MAKERS, *suffix_match.MAKERS):\n"
        "    assert list(maker().stats.cache_hits.values()) == [1], function\n"
    )
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", probe], check=False, capture_output=True, text=True, env=environment
    )
    assert (done.returncode, done.stderr) == (0, "")
