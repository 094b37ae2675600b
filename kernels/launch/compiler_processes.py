"""Processes that compile kernels for this one: half of a compilation is Python, of which a process
runs one thread at a time. Knows nothing about what is launched."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from queue import SimpleQueue
from types import SimpleNamespace

from triton.backends.compiler import GPUTarget
from triton.runtime import driver

MAX_BYTES = 1 << 16
"""Most bytes of a request."""


class CompilerProcesses:
    """The client's end; threads share it. Without processes nothing is compiled elsewhere."""

    def __init__(self, requests: Sequence[socket.socket] = ()) -> None:
        """`requests`: a socket to each process, which runs `compiler`."""
        self._num_processes = len(requests)
        self._idle: SimpleQueue[socket.socket] = SimpleQueue()
        for each in requests:
            self._idle.put(each)

    def __bool__(self) -> bool:
        return self._num_processes > 0

    def compile(self, module: str, name: str, compiled_for: str) -> None:
        """Has a function's kernel for these types, constants and options compiled into Triton's
        cache. Returns when the attempt is over, at once where the process is gone: the caller finds
        the kernel there, or compiles it and gets the error."""
        process = self._idle.get()
        with suppress(OSError):
            process.send(json.dumps([module, name, compiled_for]).encode())
            process.recv(1)
        self._idle.put(process)


def compiler(requests: socket.socket) -> Callable[[], None]:
    """The work of a copy of this process that compiles for this process's GPU. The copy opens no
    GPU."""
    return partial(_compile_on_request, requests, driver.active.get_current_target())


def _compile_on_request(requests: socket.socket, target: GPUTarget) -> None:
    """Compiles until the other end is closed."""
    driver.set_active(
        SimpleNamespace(get_current_device=lambda: 0, get_current_target=lambda: target)
    )
    while message := requests.recv(MAX_BYTES):
        # The process that asks compiles again what fails here.
        with suppress(Exception):
            module, name, compiled_for = json.loads(message)
            getattr(import_module(module), name).preload(compiled_for)
        requests.send(b"1")
