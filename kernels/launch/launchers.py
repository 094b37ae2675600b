"""Keeps the launchers of Triton's kernels apart when threads load them at the same time.

A launcher is an extension module in C, and all of them have one name. CPython lets a module of this
kind that it loads a second time from the same file overwrite the functions of the newest module of
that name. A thread that loads one between another thread's load and its look at the function would
give the latter the launcher of another kernel, which takes other arguments. Here each load yields
an object of its own, with the functions as they were in that moment.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from triton.runtime import build

_LOADING = threading.Lock()


def keep_launchers_apart() -> None:
    """Changes how this process loads launchers from now on. A second call changes nothing."""
    load = build._load_module_from_path  # Triton offers no other place
    if not isinstance(load, _ApartLoad):
        build._load_module_from_path = _ApartLoad(load)


class _ApartLoad:
    def __init__(self, load: Callable[[str, str], Any]) -> None:
        self._load = load

    def __call__(self, name: str, path: str) -> SimpleNamespace:
        with _LOADING:
            return SimpleNamespace(**vars(self._load(name, path)))
