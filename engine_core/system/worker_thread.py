"""Threads whose failure ends the process."""

from __future__ import annotations

import os
import threading
import traceback
from collections.abc import Callable


def start_worker(name: str, work: Callable[[], None]) -> threading.Thread:
    """Runs `work` in a daemon thread. An exception is printed and ends the process: whatever waits
    for the thread would wait for ever."""
    thread = threading.Thread(target=_run_or_exit, args=(work,), name=name, daemon=True)
    thread.start()
    return thread


def _run_or_exit(work: Callable[[], None]) -> None:
    try:
        work()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
