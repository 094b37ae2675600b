"""Threads that do what no other thread does: an error of one of them ends the process."""

from __future__ import annotations

import os
import threading
import traceback
from collections.abc import Callable


def start_worker(name: str, work: Callable[[], None]) -> threading.Thread:
    """Runs `work` in a thread, which ends with the process. What it raises is printed and ends the
    process: whatever waits for the work would wait for ever."""
    thread = threading.Thread(target=_run_or_exit, args=(work,), name=name, daemon=True)
    thread.start()
    return thread


def _run_or_exit(work: Callable[[], None]) -> None:
    try:
        work()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
