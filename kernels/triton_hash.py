"""Begins to hash Triton's own files when it is imported, in a thread: the keys of all compiled kernels depend on them.
That takes half a second, once in a process; a process whose forks compute imports other modules meanwhile."""

from __future__ import annotations

from importlib import import_module
from threading import Thread

from triton.runtime.cache import triton_key

# What is hashed is found by walking through these packages, which are not to be imported in two threads at once.
for _package in ("triton.backends.nvidia.compiler", "triton.compiler"):
    import_module(_package)
Thread(target=triton_key, name="triton's hash").start()
