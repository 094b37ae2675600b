"""Threads that work beside the step loop, for what waits for a disk or a network."""

from __future__ import annotations

from collections.abc import Callable
from queue import SimpleQueue
from typing import Protocol

from .worker_thread import start_worker

Job = Callable[[], None]


class Lane(Protocol):
    """Takes jobs and runs them later."""

    def submit(self, job: Job) -> None:
        """Never waits. A job that raises anything ends the process."""


class ThreadLane:
    """Threads that run jobs in their order; with one thread each ends before the next begins. The
    threads end with the process: a job that waits for a disk which does not answer delays no
    exit."""

    def __init__(self, name: str, num_threads: int = 1) -> None:
        self._name = name
        self._num_threads = num_threads
        self._jobs: SimpleQueue[Job] = SimpleQueue()
        self._has_started = False

    def submit(self, job: Job) -> None:
        if not self._has_started:
            self._has_started = True
            for _ in range(self._num_threads):
                start_worker(self._name, self._run)
        self._jobs.put(job)

    def _run(self) -> None:
        while True:
            self._jobs.get()()
