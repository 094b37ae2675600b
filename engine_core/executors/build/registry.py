"""Executors by name: what computes the steps of an engine. A module is imported when its executor
is asked for, since a simulated engine starts before torch is loaded."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module

from ...config import EngineConfig, require
from ...executor import Executor
from ...options import ExecutorOptions, ModelFacts, Progress

EXECUTORS = {
    "single": "headwater.engine_core.executors.build.single",
    "simulated": "headwater.engine_core.executors.build.simulated",
}
"""Modules that offer `build_executor(options, progress)`. The first computes a model on one of the
platforms."""


def build_executor(
    options: ExecutorOptions, progress: Progress
) -> tuple[Executor, EngineConfig, ModelFacts]:
    """Raises `ConfigError` naming what cannot be served."""
    require(options.executor in EXECUTORS, "executor", options.executor, " or ".join(EXECUTORS))
    with _without_collections():
        module = import_module(EXECUTORS[options.executor])
    built: tuple[Executor, EngineConfig, ModelFacts] = module.build_executor(options, progress)
    return built


@contextmanager
def _without_collections() -> Iterator[None]:
    """Imports make no garbage; to look for it took a fifth of their time (2026-11-27)."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
