"""Begins to hash Triton's own files when it is imported, in a thread: the keys of all compiled
kernels depend on them. That takes half a second, once in a process; a process whose forks compute
imports other modules meanwhile."""

from __future__ import annotations

from importlib import import_module
from threading import Thread

from triton.runtime.cache import triton_key

# The hash walks through these packages and imports them; two threads must not do that at once.
for _package in ("triton.backends.nvidia.compiler", "triton.compiler"):
    import_module(_package)
Thread(target=triton_key, name="triton's hash").start()
