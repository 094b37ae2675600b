"""A copy of a process runs what it is told, holds no other descriptor and ends as a child does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from headwater.engine_core.parallel.copied_process import CopiedProcess


def fail() -> None:
    raise ValueError("what it ran")


@pytest.mark.parametrize(
    ("run", "status"),
    [(lambda: None, 0), (lambda: sys.exit(3), 3), (lambda: sys.exit("a sentence"), 1), (fail, 1)],
    ids=["returned", "a number", "a sentence", "raised"],
)
def test_the_status_says_how_the_copy_ended(run: Callable[[], None], status: int) -> None:
    assert CopiedProcess(run, ()).wait(60) == status


def test_an_error_of_the_copy_is_logged_like_the_parents(capfd: pytest.CaptureFixture[str]) -> None:
    CopiedProcess(fail, ()).wait(60)
    assert "ValueError: what it ran" in capfd.readouterr().err


def test_a_copy_is_waited_for_and_killed() -> None:
    copied = CopiedProcess(lambda: time.sleep(600), ())
    with pytest.raises(subprocess.TimeoutExpired):
        copied.wait(0.05)
    copied.kill()
    assert copied.wait(60) == -signal.SIGKILL
    # Its number may be another's by now.
    copied.kill()


def test_a_copy_holds_no_pipe_open_that_it_was_not_given() -> None:
    kept_read, kept_write = os.pipe()
    others_read, others_write = os.pipe()
    report_read, report_write = os.pipe()

    def run() -> None:
        # Waits for the parent's end of both.
        os.write(report_write, b"begun")
        os.read(kept_read, 1)
        assert os.fstat(others_read).st_rdev != 0, "the number is still a pipe"

    copied = CopiedProcess(run, (kept_read, report_write))
    assert os.read(report_read, 5) == b"begun"
    os.close(others_write)
    assert os.read(others_read, 1) == b"", "the copy holds the other end"
    os.close(kept_write)
    assert copied.wait(60) == 0
    for number in (kept_read, others_read, report_read, report_write):
        os.close(number)
