"""`headwater warmup`: runs each kernel once that an engine with these settings may launch, so the cache has all."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from ..runtime.settings import read_settings
from .core_client import core_environment
from .settings import EngineSettings

READY = "HEADWATER_WARMUP_READY"
"""Says that the environment is that of an engine's core; it is read when libraries are imported."""


def main() -> None:
    settings = read_settings(EngineSettings, sys.argv[1:], prog="headwater warmup")
    if READY not in os.environ:
        environment = core_environment(settings.threads) | {READY: "1"}
        os.execve(
            sys.executable, [sys.executable, "-m", "headwater.services.engine.warmup", *sys.argv[1:]], environment
        )
    began = time.monotonic()
    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True)) as bars:
        bar = bars.add_task("loading", total=None)
        # Imported here: torch takes seconds.
        from headwater.engine_core.config import ConfigError  # noqa: PLC0415
        from headwater.engine_core.executors.warmup import warm_up  # noqa: PLC0415

        from .core_process import executor_options  # noqa: PLC0415

        options = executor_options(replace(settings, device="cuda", load_format="dummy"))
        try:
            for what, done, total in warm_up(options):
                bars.update(bar, description=what, completed=done, total=total)
        except ConfigError as error:
            sys.exit(f"headwater: {error}")
    print(f"kernels compiled in {time.monotonic() - began:.0f} s: {os.environ['TRITON_CACHE_DIR']}")


if __name__ == "__main__":
    main()
