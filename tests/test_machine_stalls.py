"""What the machine takes is what an observer that stands still says, within the stretch that is
asked for."""

from __future__ import annotations

import os
import signal
import time

import pytest

from tests.machine_stalls import MachineStalls


def test_an_observer_that_is_held_for_a_while_says_so() -> None:
    with MachineStalls() as stalls:
        os.kill(stalls.pid, signal.SIGSTOP)
        began = time.monotonic()
        time.sleep(0.3)
        middle = time.monotonic()
        time.sleep(0.3)
        ended = time.monotonic()
        os.kill(stalls.pid, signal.SIGCONT)
        # A sleep of 5 ms may have begun when the observer was stopped.
        assert stalls.seconds_between(began, ended) == pytest.approx(ended - began, abs=0.006)
        assert stalls.seconds_between(began, middle) == pytest.approx(middle - began, abs=0.006)
        assert stalls.seconds_between(ended, ended) == 0


def test_an_observer_ends_with_its_context() -> None:
    with MachineStalls() as stalls:
        pid = stalls.pid
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
