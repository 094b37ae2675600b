"""Threads that load kernels on the GPU, those first that are launched first. Knows nothing about
lists of kernels, nor about what is launched."""

from __future__ import annotations

import json
import logging
import time
from collections import deque
from collections.abc import Iterable
from importlib import import_module
from threading import Lock, Thread

from triton.runtime import driver

from .launchers import keep_launchers_apart

log = logging.getLogger(__name__)
Kernel = tuple[str, str, str]
"""Module and name of a kernel's function, and the types, constants and options that it was compiled
for, as Triton's JSON."""


class KernelLoads:
    """Loads of one process. A kernel that is launched before its turn is loaded by the launch."""

    def __init__(self) -> None:
        self._left: deque[Kernel] = deque()
        self._known: set[Kernel] = set()
        """Kernels that are loaded, are being loaded or wait for it."""
        self._threads: list[Thread] = []
        self._failed: set[tuple[str, str]] = set()
        """Functions of which a kernel could not be loaded."""
        self._lock = Lock()
        self._began_at = time.perf_counter()
        self._num_loaded = 0
        self._stands_by = False

    @property
    def are_behind(self) -> bool:
        """Whether the loads of a process that stood by are under way."""
        return self._stands_by and any(thread.is_alive() for thread in self._threads)

    def has_failed(self, kernel: Kernel) -> bool:
        """Whether a kernel of the same function could not be loaded."""
        return kernel[:2] in self._failed

    def begin(
        self, kernels: Iterable[Kernel], num_threads: int, *, stands_by: bool = False
    ) -> None:
        """Loads kernels by so many threads more, each once in the life of the process, and again
        those that could not be loaded, as when memory was short while the process stood by."""
        keep_launchers_apart()
        self._began_at = time.perf_counter()
        self._stands_by = stands_by
        with self._lock:
            self._known -= {each for each in self._known if self.has_failed(each)}
            self._failed.clear()
        new = [each for each in kernels if each not in self._known]
        self._known.update(new)
        self._left.extend(new)
        # No engine waits at its end for kernels that it does not launch any more.
        threads = [
            Thread(target=self._load, name="kernels", daemon=True) for _ in range(num_threads)
        ]
        self._threads += threads
        for thread in threads:
            thread.start()

    def join(self) -> None:
        """Waits until all kernels are loaded."""
        while self._threads:
            self._threads.pop().join()
        if self._num_loaded:
            seconds = time.perf_counter() - self._began_at
            log.info("kernels: %d loaded ahead, %.1f s", self._num_loaded, seconds)
            self._num_loaded = 0

    def _load(self) -> None:
        while True:
            try:
                kernel = self._left.popleft()
            except IndexError:
                return
            if self.has_failed(kernel):
                continue
            try:
                self._load_one(*kernel)
            except Exception as error:
                module, name, _ = kernel
                log.warning("kernels of %s were not loaded ahead: %r", name, error)
                with self._lock:
                    self._failed.add((module, name))

    def _load_one(self, module: str, name: str, compiled_for: str) -> None:
        kernels = getattr(import_module(module), name)
        with self._lock:
            # NOTE: the first access makes the table of a function; a second one at the same time
            # would make another.
            there, *_ = kernels.device_caches[driver.active.get_current_device()]
        if json.loads(compiled_for)["key"] not in there:
            # The first access loads the kernel on the GPU.
            assert kernels.preload(compiled_for).run
            with self._lock:
                self._num_loaded += 1
