"""Kernels that an engine has compiled, listed beside them: a later process loads them before it
launches any, while it reads weights or stands by. Knows nothing about what is launched."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
import time
from collections import defaultdict
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import triton
import triton.language as tl
from triton.runtime import driver, jit

from .device import kernel_cache_dir
from .launchers import keep_launchers_apart

log = logging.getLogger(__name__)
MAX_THREADS = 8
"""Number of loading threads. A kernel takes 0.14 s of one thread (H200, 2026-11-30), part of which
holds Python's lock or the driver's."""
_serialize = jit.serialize_specialization_data
Facts = dict[str, int]
"""Facts of an engine that later ones need not find out."""
_Function = tuple[str, str]
"""Module and name of a kernel's function."""


class KernelList:
    """The kernels of engines that compute the same bits."""

    def __init__(self, name: str) -> None:
        self._folder = kernel_cache_dir() / f"list-{name}"
        self._path = self._folder / "kernels.json"
        self._kernels = self._read()
        """Types, constants and options that each function was compiled for, as Triton's JSON."""
        self._are_all_loaded = False
        """Whether this process has loaded every listed kernel."""
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
        or where this process has not loaded all that such an engine launches."""
        if not self._are_all_loaded:
            return None
        with suppress(OSError, ValueError):
            facts: Facts = json.loads(self._facts_path(engine).read_bytes())
            return facts
        return None

    def keep(self, engine: str = "", facts: Facts | None = None) -> None:
        """Writes the list for later processes, which without it load each kernel when it is
        launched. `facts`: of an engine of this configuration, all of whose kernels are compiled."""
        rows = [
            [*function, each] for function, found in self._kernels.items() for each in sorted(found)
        ]
        with suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            _write(self._path, rows)
            if facts is not None and self._are_all_listed:
                _write(self._facts_path(engine), facts)

    @contextmanager
    def loading(self, num_cores: int) -> Iterator[None]:
        """Scope beside which threads load the kernels that an earlier process has listed. On exit
        all are loaded; one that is not is logged, and is loaded or compiled when it is launched."""
        keep_launchers_apart()
        begin = time.perf_counter()
        # One thread for all kernels of a function: Triton keeps them in one table.
        with ThreadPoolExecutor(min(num_cores, MAX_THREADS), "kernels") as pool:
            found = self._read()
            counts = [pool.submit(_load, *each) for each in found.items()]
            yield
        loaded = [each.result() for each in counts]
        self._are_all_loaded = bool(found) and None not in loaded
        if num_loaded := sum(each or 0 for each in loaded):
            log.info("kernels: %d loaded ahead, %.1f s", num_loaded, time.perf_counter() - begin)

    def _read(self) -> dict[_Function, set[str]]:
        """The list of an earlier process; nothing where it is missing or damaged."""
        listed: dict[_Function, set[str]] = defaultdict(set)
        with suppress(OSError, ValueError):
            for module, name, compiled_for in json.loads(self._path.read_bytes()):
                listed[module, name].add(compiled_for)
        return listed

    def _note(self, *, fn: Any, compile: dict[str, Any], **rest: object) -> None:
        if (kernel := named(fn, compile)) is None:
            self._are_all_listed = False
            return
        module, name, compiled_for = kernel
        self._kernels[module, name].add(compiled_for)

    def _facts_path(self, engine: str) -> Path:
        digest = hashlib.blake2b(engine.encode(), digest_size=8).hexdigest()
        return self._folder / f"engine-{digest}.json"


def serialize_safely() -> None:
    """Changes how this process writes down what a kernel was compiled for from now on: it writes
    nothing where JSON would change that. A second call changes nothing."""
    jit.serialize_specialization_data = _serialized  # Triton offers no other place


def named(fn: Any, compile: dict[str, Any]) -> tuple[str, str, str] | None:
    """Module and name of a kernel's function, and what it is compiled for, of the arguments of
    Triton's hooks. None where another process would not find it by these."""
    compiled_for = compile["specialization_data"]
    found = getattr(sys.modules.get(fn.module), fn.name, None)
    return (fn.module, fn.name, compiled_for) if compiled_for and found is fn.jit_function else None


def _load(function: _Function, found: Collection[str]) -> int | None:
    """Loads kernels of a function. Returns how many this process did not have; None: one cannot be
    loaded."""
    module, name = function
    num_loaded = 0
    try:
        kernels = getattr(import_module(module), name)
        there, *_ = kernels.device_caches[driver.active.get_current_device()]
        for compiled_for in found:
            if json.loads(compiled_for)["key"] not in there:
                # The first access loads the kernel on the GPU.
                assert kernels.preload(compiled_for).run
                num_loaded += 1
    except Exception as error:
        log.warning("kernels of %s were not loaded ahead: %r", name, error)
        return None
    return num_loaded


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
