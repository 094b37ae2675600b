"""Begins in threads what compilers do once in a process, about half a second each, beside the
driver's own start."""

from __future__ import annotations

from importlib import import_module
from itertools import chain
from threading import Thread

from triton.runtime.cache import triton_key

NUMBA_START = "headwater.kernels.cpu.compiler.compiler_start"
MACHINE_CODE = "headwater.kernels.cpu.compiler.machine_code"
DRAFTING = ("headwater.kernels.cpu.suffix_match", "headwater.kernels.cpu.drafts")


def hash_triton() -> None:
    """Begins to hash Triton's own files, on which the key of every compiled kernel depends. It
    keeps the hash."""
    Thread(target=triton_key, name="triton's hash", daemon=True).start()


def start_numba() -> None:
    """Begins to start numba's compiler, whose functions look drafts up on the host. Not before this
    process is forked: a fork would find its locks held."""
    Thread(target=_start_numba, name="numba's start", daemon=True).start()


def _start_numba() -> None:
    import_module(NUMBA_START)
    makers = chain.from_iterable(import_module(each).MAKERS for each in DRAFTING)
    import_module(MACHINE_CODE).compile_apart(makers)
