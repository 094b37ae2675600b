"""`headwater run`: a file of requests against a running deployment, or against one that is started
for it alone."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console

from ..runtime.printable import shown
from ..runtime.progress import ProgressBars
from ..runtime.settings import require
from ..runtime.tasks import owned_task
from ..stack.fork_servers import ForkServers, fork_servers
from ..stack.memory_shares import StartedModel
from ..stack.settings import StackSettings
from . import chat as chat_room
from .base_url import api_of, gateway_of
from .batch_run import BatchRun
from .up import pulled

NOT_ALONE = (
    "admin_key_file",
    "allowed_origins",
    "api_key_file",
    "grpc_port",
    "host",
    "idle_seconds",
    "max_replicas",
    "min_replicas",
    "nats_url",
    "port",
    "redis_url",
    "root_path",
    "state_dir",
    "target_requests",
    "tls_cert_file",
    "tls_client_ca_file",
    "tls_key_file",
    "tokenizer_info",
    "trust_forwarded_prefix",
)
"""Settings of `headwater up` that `headwater run` does not take, since its deployment serves no
other clients."""
ADMIN_KEY = "HEADWATER_ADMIN_KEY"
ALONE: dict[str, Any] = {"port": 0, "grpc_port": 0}
"""Settings of a deployment without clients of its own: it listens on free ports."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """The file of requests, and where they are sent."""

    file: Path
    output: Path | None
    base_url: str | None
    api_key: str
    concurrency: int

    def __post_init__(self) -> None:
        """Raises `SettingError`."""
        require(self.file.is_file(), "file", str(self.file), "an existing file of requests")
        require(self.results != self.file, "output", str(self.results), "another file than FILE")
        require(self.concurrency >= 1, "concurrency", self.concurrency, "1 or more")

    @property
    def results(self) -> Path:
        return self.output or self.file.with_suffix(".results.jsonl")


def run_file(options: RunOptions, settings: StackSettings, console: Console) -> int:
    """Runs all requests; the exit status is 1 where one has failed. Raises `BatchFileError`, what
    starting a deployment raises, and `httpx.TransportError`."""
    run = BatchRun(options.file, options.results)
    if run.lines and options.base_url is not None:
        url = gateway_of(options.base_url)
        asyncio.run(_run_at(run, url, options, console))
    elif run.lines:
        _run_alone(run, options, settings, console)
    kept = f"{run.num_kept} kept, " if run.num_kept else ""
    answered = run.statuses.total() - run.num_failed
    console.print(
        f"{kept}{answered} answered, {run.num_failed} failed: {shown(str(options.results))}"
    )
    return int(run.num_failed > 0)


async def _run_at(run: BatchRun, url: str, options: RunOptions, console: Console) -> None:
    """Runs the requests at a gateway. Raises `ChatError` where it serves no model."""
    headers = {"authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    with httpx.Client(base_url=api_of(url), headers=headers, timeout=10) as client:
        model = chat_room.first_model(client)
    with ProgressBars(console) as bars:
        await run.run(
            url, headers, model=model, num_at_once=options.concurrency, report=bars.report
        )


def _run_alone(
    run: BatchRun, options: RunOptions, settings: StackSettings, console: Console
) -> None:
    """Starts a deployment with a state folder of its own, and ends it when all is answered."""
    # The deployment would ask for keys, and has no tenants.
    os.environ.pop(ADMIN_KEY, None)
    with tempfile.TemporaryDirectory(prefix="headwater-run-") as folder:
        settings = replace(settings, state_dir=Path(folder), **ALONE).resolved()
        with fork_servers(settings) as forks:
            settings, models = pulled(settings, console)
            asyncio.run(_run_in(run, options, settings, models, console, forks))


async def _run_in(
    run: BatchRun,
    options: RunOptions,
    settings: StackSettings,
    models: Sequence[StartedModel],
    console: Console,
    forks: ForkServers,
) -> None:
    # Servers of forks import beside this process: they are started before it imports what NATS and
    # HTTP take.
    from ..stack.local_stack import LocalStack  # noqa: PLC0415

    stack = LocalStack(
        settings,
        models,
        report=lambda what: console.print(f"[yellow]{shown(what)}"),
        forks=forks,
    )
    try:
        with ProgressBars(console) as bars:
            await stack.start(bars.report)
        assert stack.record is not None
        async with owned_task(stack.run()):
            await _run_at(run, stack.record.rest, replace(options, api_key=""), console)
    finally:
        await stack.stop()
