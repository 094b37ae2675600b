"""The engine service: a replica of a model. This process is the server; it starts the core that
computes."""

from __future__ import annotations

import sys

from ..models.draft_model import check_draft_model
from ..models.manifest import ModelFolderError, ModelManifest
from ..models.model_refused import ModelRefused
from ..runtime.process import configure_logging, in_one_line, lifetime, run_stage
from ..runtime.settings import SettingError, read_settings
from ..runtime.stage_security import stages_secured
from ..runtime.unread_variables import warn_of_unread_variables
from .core.client import CoreClient, CoreFailed
from .settings import EngineSettings


async def serve(settings: EngineSettings) -> None:
    """Serves from the start to the last token. Raises `CoreFailed`, `ModelFolderError` or
    `ModelRefused`."""
    if settings.model_folder is not None:
        ModelManifest.read(settings.model_folder)
        if settings.draft_model is not None:
            check_draft_model(settings.model_folder, settings.draft_model)
    async with lifetime("engine") as life, CoreClient.running(settings) as core:
        # The core takes longest to start: it is started before the server imports gRPC, NATS and
        # Redis.
        from .stage.serving import serve_core  # noqa: PLC0415

        await serve_core(settings, core, life)


def main() -> None:
    with in_one_line("engine", SettingError, CoreFailed, ModelFolderError, ModelRefused, OSError):
        settings = read_settings(EngineSettings, sys.argv[1:], prog="headwater serve engine")
        configure_logging("engine", settings.log_level)
        warn_of_unread_variables()
        with stages_secured(settings):
            run_stage(serve(settings))


if __name__ == "__main__":
    main()
