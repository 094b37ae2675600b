"""The program behind `headwater serve stage`: a pipeline stage of an engine on another host. It
joins the engine, and joins again when the engine or its own ranks end, until it is stopped."""

from __future__ import annotations

import logging
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

import structlog

from headwater.engine_core.config import ConfigError
from headwater.engine_core.parallel.host_join import JoinRefused

from ...models.manifest import ModelFolderError, ModelManifest
from ...runtime.process import PARENT_FD, configure_logging, in_one_line
from ...runtime.settings import SettingError, read_settings, require, setting
from ...runtime.unread_variables import warn_of_unread_variables
from ..core.environment import core_environment
from ..settings import STAGE_SECRET_FILE


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSettings:
    """A pipeline stage of an engine on another host. The engine says everything that is not set
    here."""

    join: str = setting("", "host:port of the engine's --stage-listen")
    stage_secret_file: Path | None = setting(None, STAGE_SECRET_FILE)
    model_folder: Path | None = setting(None, "converted model, the same as the engine's")
    threads: int = setting(0, "threads that compute; 0: one for each core")
    log_level: str = setting("info", "debug, info, warning or error")

    def __post_init__(self) -> None:
        require(self.join, "join", None, "host:port of an engine with --stage-listen")
        require(
            self.stage_secret_file is not None,
            "stage_secret_file",
            None,
            "the file with the engine's secret",
        )
        require(
            self.model_folder is not None, "model_folder", None, "the folder of a converted model"
        )
        require(self.threads >= 0, "threads", self.threads, "0 or more")


def serve(settings: StageSettings) -> None:
    """Computes until a signal comes or the supervisor is gone. Raises `ConfigError`, `JoinRefused`
    and `ModelFolderError`."""
    assert settings.stage_secret_file is not None
    assert settings.model_folder is not None
    ModelManifest.read(settings.model_folder)
    stops = [_signalled(), *([int(os.environ[PARENT_FD])] if PARENT_FD in os.environ else [])]
    # Libraries read it when they are imported.
    os.environ |= core_environment(settings.threads)
    from headwater.engine_core.executors.ranks.stage_host import StageHost  # noqa: PLC0415

    StageHost(
        settings.join, settings.stage_secret_file, settings.model_folder, settings.threads, stops
    ).run()


class StageLog(logging.Handler):
    """Writes the engine core's log records into this stage's log."""

    def emit(self, record: logging.LogRecord) -> None:
        structlog.get_logger().log(record.levelno, record.getMessage())


def _signalled() -> int:
    """A descriptor that is readable once a signal asks this process to end."""
    stopped, stop = os.pipe()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: os.write(stop, b"\0"))
    return stopped


def main() -> None:
    with in_one_line("stage", SettingError, ConfigError, JoinRefused, ModelFolderError, OSError):
        settings = read_settings(StageSettings, sys.argv[1:], prog="headwater serve stage")
        configure_logging("stage", settings.log_level)
        warn_of_unread_variables()
        logging.basicConfig(level=settings.log_level.upper(), handlers=[StageLog()])
        serve(settings)


if __name__ == "__main__":
    main()
