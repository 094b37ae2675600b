"""Kernels that an engine has compiled, listed beside them: a later process loads them before it
launches any, while it reads weights or stands by. Knows nothing about what is launched."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import triton
import triton.language as tl
from triton.runtime import jit

from .device import kernel_cache_dir
from .kernel_loads import Kernel, KernelLoads

MAX_THREADS = 8
"""Number of loading threads. A kernel takes 0.14 s of one thread (H200, 2026-11-30), part of which
holds Python's lock or the driver's."""
_serialize = jit.serialize_specialization_data
Facts = dict[str, int]
"""Facts of an engine that later ones need not find out."""


class KernelList:
    """The kernels of engines that compute the same bits."""

    def __init__(self, name: str) -> None:
        self._folder = kernel_cache_dir() / f"list-{name}"
        self._path = self._folder / "kernels.json"
        self._kernels = dict.fromkeys(self._read())
        """Kernels in the order in which they were compiled, which is nearly that of their first
        launches."""
        self._loads = loads_of_process()
        self._are_ahead = False
        """Whether every listed kernel is loaded, or is while an engine that takes over serves."""
        self._are_all_listed = True
        """Whether every kernel that this process has compiled can be listed."""

    def begin(self) -> None:
        """Lists what is compiled from now on; `keep` writes it down."""
        serialize_safely()
        triton.knobs.runtime.jit_post_compile_hook = self._note

    @property
    def is_empty(self) -> bool:
        """Whether no engine has listed kernels here."""
        return not self._kernels

    def kept_facts(self, engine: str) -> Facts | None:
        """Returns what an earlier engine of the same configuration has kept; None where it has not,
        or where this process cannot load all that such an engine launches."""
        if not self._are_ahead or any(map(self._loads.has_failed, self._kernels)):
            return None
        with suppress(OSError, ValueError):
            facts: Facts = json.loads(self._facts_path(engine).read_bytes())
            return facts
        return None

    def keep(self, engine: str = "", facts: Facts | None = None) -> None:
        """Writes the list for later processes, which without it load each kernel when it is
        launched. `facts`: of an engine of this configuration, all of whose kernels are compiled."""
        with suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            _write(self._path, list(self._kernels))
            if facts is not None and self._are_all_listed:
                _write(self._facts_path(engine), facts)

    @contextmanager
    def loading(self, num_cores: int) -> Iterator[None]:
        """Scope beside which threads load the kernels that an earlier process has listed. On exit
        all are loaded; one that is not is logged, and is loaded or compiled when it is launched.

        Where this process stood by and still loads, the scope does not wait: answers that were lost
        go on with the kernels of their next step, and the others are loaded behind it.
        """
        found = self._read()
        takes_over = self._loads.are_behind
        self._loads.begin(found, min(num_cores, MAX_THREADS))
        yield
        if not takes_over:
            self._loads.join()
        self._are_ahead = bool(found)

    def load_behind(self) -> None:
        """Has one thread load the listed kernels while this process stands by."""
        self._loads.begin(self._read(), num_threads=1, stands_by=True)

    def _read(self) -> list[Kernel]:
        """The list of an earlier process; nothing where it is missing or damaged."""
        with suppress(OSError, ValueError):
            return [
                (module, name, each) for module, name, each in json.loads(self._path.read_bytes())
            ]
        return []

    def _note(self, *, fn: Any, compile: dict[str, Any], **rest: object) -> None:
        if (kernel := named(fn, compile)) is None:
            self._are_all_listed = False
            return
        self._kernels[kernel] = None

    def _facts_path(self, engine: str) -> Path:
        digest = hashlib.blake2b(engine.encode(), digest_size=8).hexdigest()
        return self._folder / f"engine-{digest}.json"


@cache
def loads_of_process() -> KernelLoads:
    """Loads of this process, which an engine finds under way where it takes over from a lost
    one."""
    return KernelLoads()


def serialize_safely() -> None:
    """Changes how this process writes down what a kernel was compiled for from now on: it writes
    nothing where JSON would change that. A second call changes nothing."""
    jit.serialize_specialization_data = _serialized  # Triton offers no other place


def named(fn: Any, compile: dict[str, Any]) -> Kernel | None:
    """Module and name of a kernel's function, and what it is compiled for, of the arguments of
    Triton's hooks. None where another process would not find it by these."""
    compiled_for = compile["specialization_data"]
    found = getattr(sys.modules.get(fn.module), fn.name, None)
    return (fn.module, fn.name, compiled_for) if compiled_for and found is fn.jit_function else None


def _write(path: Path, content: object) -> None:
    """Writes a file that other processes see whole or not at all. Raises `OSError`."""
    partial = path.with_suffix(f".{os.getpid()}")
    partial.write_text(json.dumps(content))
    partial.replace(path)


def _serialized(
    name: str, signature: object, constants: dict[Any, Any], attrs: object, *rest: object
) -> str:
    """Types, constants and options that a kernel was compiled for; empty where JSON would change
    the constants."""
    kept = bool | int | float | str | None | tl.dtype | tl.constexpr
    if not all(isinstance(value, kept) for value in constants.values()):
        return ""
    compiled_for: str = _serialize(name, signature, constants, attrs, *rest)
    return compiled_for
