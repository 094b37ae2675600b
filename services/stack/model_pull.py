"""Pulls a model in a child, so that a supervisor goes on meanwhile and need not wait for it when it ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from pathlib import Path

from headwater.services.kept_child import keeper_command
from headwater.services.progress import Report
from headwater.services.stack.settings import StackSettings
from headwater.services.stack.stage_process import SupervisorPipe

STOP_SECONDS = 2.0


class PullFailed(Exception):
    """Carries the child's last words."""


async def pull_model(model: str, settings: StackSettings, supervisor: SupervisorPipe, report: Report) -> Path:
    """The model's folder. Raises `PullFailed`; cancelled, it leaves nothing behind that runs."""
    process = await asyncio.create_subprocess_exec(
        *keeper_command(pipe=supervisor.watched, limit=STOP_SECONDS),
        *(sys.executable, "-m", "headwater.services.models.pulling"),
        *(model, str(settings.cache_dir), settings.dtype, settings.device),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        pass_fds=[supervisor.watched],
        start_new_session=True,
    )
    folder, last_words = None, "it said nothing"
    try:
        assert process.stdout is not None
        async for line in process.stdout:
            if not line.startswith(b"{"):
                last_words = line.decode(errors="replace").strip() or last_words
            elif "folder" in (word := json.loads(line)):
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
