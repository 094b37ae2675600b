"""Functions in machine code for this CPU. It is kept in `NUMBA_CACHE_DIR`, or beside the Python
bytecode.

Starts without torch, which an engine that computes no model never loads.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import numba
from numba import njit
from numba.core.caching import UserProvidedCacheLocator


def compile_function(function: Callable[..., None], signature: Any) -> Callable[..., None]:
    """`function` in machine code, called from Python with arrays. It holds no interpreter lock and
    checks no bounds."""
    with compiling(function) as is_kept:
        compiled: Callable[..., None] = njit(signature, cache=is_kept, nogil=True)(function)
    return compiled


@contextmanager
def compiling(function: Callable[..., None]) -> Iterator[bool]:
    """Whether machine code of the function is cached. If so, one process compiles it while others
    wait and then load the code; different functions are compiled at the same time."""
    folder = _cache_folder()
    if folder is None:
        yield False
        return
    with (folder / lock_name(function)).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield True


Maker = tuple[Callable[..., None], Callable[[], object]]
"""A function, and what compiles it without arguments."""


def compile_apart(makers: Iterable[Maker]) -> None:
    """Has a process for each function compile it, unless one has begun that before: compiling holds
    Python's lock for seconds. Waits for them."""
    folder = _cache_folder()
    if folder is None:
        return
    processes = [
        _maker_process(maker)
        for function, maker in makers
        if not (folder / lock_name(function)).exists()
    ]
    for each in processes:
        each.wait()


def _maker_process(maker: Callable[[], object]) -> subprocess.Popen[bytes]:
    program = f"from {maker.__module__} import {maker.__name__}; {maker.__name__}()"
    return subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.DEVNULL)


def lock_name(function: Callable[..., None]) -> str:
    """The file that a process locks while it compiles the function, for any types. Functions that
    a function has made of constants share one, as numba keeps their code in one index."""
    return f"{function.__module__}.{function.__qualname__.replace('<locals>', 'locals')}.lock"


class ByModule(UserProvidedCacheLocator):  # type: ignore[misc]  # numba is not typed
    """Keeps the machine code of a function in a folder that is named after its module. numba names
    the folder after the path of the source file, so that each copy of the same sources on a machine
    would compile them anew."""

    def __init__(self, function: Any, source: str) -> None:
        super().__init__(function, source)
        self._cache_path = os.path.join(numba.config.CACHE_DIR, function.__module__)


@cache
def _cache_folder() -> Path | None:
    """Folder in which machine code is kept; None: it is not kept.

    Points numba at a folder of its own for these sources: it looks at the age of a kernel's file
    only, not at those of what the kernel calls.
    """
    here = Path(__file__).parents[1]
    sources = b"".join(path.read_bytes() for path in sorted(here.rglob("*.py")))
    name = hashlib.blake2b(sources, digest_size=8).hexdigest()
    base = Path(os.environ.get("NUMBA_CACHE_DIR") or here / "__pycache__")
    folder = base if base.name == name else base / name
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    # Both are set: numba reads its settings, and overwrites them from the environment before it
    # compiles.
    os.environ["NUMBA_CACHE_DIR"] = numba.config.CACHE_DIR = str(folder)
    locator = f"{__name__}.{ByModule.__name__}"
    os.environ["NUMBA_CACHE_LOCATOR_CLASSES"] = numba.config.CACHE_LOCATOR_CLASSES = locator
    return folder if os.access(folder, os.W_OK) else None
