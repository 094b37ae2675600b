"""Pulls a model in a child process, so that the supervisor is not blocked and can end at any
time."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from pathlib import Path

from ..runtime.kept_child import keeper_command
from ..runtime.progress import Report, word_of
from .settings import StackSettings
from .stage_process import SupervisorPipe

STOP_SECONDS = 2.0


class PullFailed(Exception):
    """Carries the child's last words."""


async def pull_model(
    model: str, settings: StackSettings, supervisor: SupervisorPipe, report: Report
) -> Path:
    """The model's folder. Raises `PullFailed`. Cancelling ends the child."""
    process = await asyncio.create_subprocess_exec(
        *keeper_command(pipe=supervisor.watched, limit=STOP_SECONDS),
        *(sys.executable, "-m", "headwater.services.models.pulling"),
        *(model, str(settings.cache_dir), settings.dtype, settings.device, settings.quantization),
        *(settings.model_code, settings.revision or "", str(settings.calibration or "")),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        pass_fds=[supervisor.watched],
        start_new_session=True,
    )
    folder = None
    last_words = "it printed nothing"
    try:
        assert process.stdout is not None
        async for line in _lines(process.stdout):
            if (word := word_of(line)) is None:
                last_words = line or last_words
            elif "folder" in word:
                folder = Path(word["folder"])
            else:
                report(word["what"], word["done"], word["total"])
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await process.wait()
    if folder is None:
        raise PullFailed(last_words)
    return folder


async def _lines(output: asyncio.StreamReader) -> AsyncIterator[str]:
    """Lines of the output to its end. A line that is longer than the limit is left out."""
    while True:
        with contextlib.suppress(ValueError):
            if not (line := await output.readline()):
                return
            yield line.decode(errors="replace").strip()
