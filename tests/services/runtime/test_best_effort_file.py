"""Programs whose output cannot be written."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

FULL = Path("/dev/full")
SHOWS = """
import sys
from rich.console import Console
from headwater.services.runtime.best_effort_file import BestEffortFile
from headwater.services.runtime.progress import ProgressBars
sys.stdin.read()
console = Console(file=BestEffortFile(sys.stdout))
with ProgressBars(console) as bars:
    for done in range(3):
        bars.report("a file", done, 2)
for _ in range(1000):
    console.print("a line" * 10)
print("went on", file=sys.stderr)
"""


def started(stdout: int) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, "-c", SHOWS], stdin=pipe, stdout=stdout, stderr=pipe, text=True
    )


def test_bars_and_lines_whose_reader_is_gone_end_nothing() -> None:
    with started(subprocess.PIPE) as program:
        assert program.stdout is not None
        program.stdout.close()
        program.stdout = None
        _, printed = program.communicate(timeout=60)
    assert (program.returncode, printed) == (0, "went on\n")


@pytest.mark.skipif(not FULL.exists(), reason="the system has no device that is always full")
def test_bars_and_lines_on_a_full_disk_end_nothing() -> None:
    with FULL.open("wb") as full, started(full.fileno()) as program:
        _, printed = program.communicate(timeout=60)
    assert printed.startswith("went on\n")
