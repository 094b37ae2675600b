"""`headwater warmup`: runs each kernel once that an engine with these settings may launch, so the
cache has all."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from ...runtime.settings import read_settings
from ..core.environment import core_environment
from ..settings import EngineSettings

READY = "HEADWATER_WARMUP_READY"
"""Variable that is set in the environment of an engine's core, which must be complete before
libraries are imported."""


def main() -> None:
    settings = read_settings(EngineSettings, sys.argv[1:], prog="headwater warmup")
    in_core_environment("headwater.services.engine.programs.warmup", settings.threads)
    compile_shown(
        partial(_phases, replace(settings, device="cuda", load_format="dummy")), "TRITON_CACHE_DIR"
    )


def in_core_environment(module: str, threads: int) -> None:
    """Replaces this process by the module with the environment of an engine's core, unless it has
    that environment."""
    if READY not in os.environ:
        environment = core_environment(threads) | {READY: "1"}
        os.execve(sys.executable, [sys.executable, "-m", module, *sys.argv[1:]], environment)


def compile_shown(phases: Callable[[], Iterable[tuple[str, int, int]]], variable: str) -> None:
    """Goes through (phase, done, total) and shows them. `variable` names the folder that the
    kernels go to."""
    began = time.monotonic()
    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True)) as bars:
        bar = bars.add_task("loading", total=None)
        # Imported here: torch takes seconds.
        from headwater.engine_core.config import ConfigError  # noqa: PLC0415

        try:
            for what, done, total in phases():
                bars.update(bar, description=what, completed=done, total=total)
        except ConfigError as error:
            sys.exit(f"headwater: {error}")
    print(f"kernels compiled in {time.monotonic() - began:.0f} s: {os.environ[variable]}")


def _phases(settings: EngineSettings) -> Iterable[tuple[str, int, int]]:
    from headwater.engine_core.executors.build.warmup import warm_up  # noqa: PLC0415

    from ..core.process import executor_options  # noqa: PLC0415

    return warm_up(executor_options(settings))


if __name__ == "__main__":
    main()
