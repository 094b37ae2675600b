"""`headwater up` in a terminal: the model first, then the cluster, then what to do with it, until
Ctrl-C."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Coroutine, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console

from ..models import store as model_store
from ..models.manifest import ModelManifest
from ..models.model_place import read_places
from ..runtime.hardware import has_gpu_driver
from ..runtime.owner_file import own_folder
from ..runtime.printable import shown
from ..runtime.progress import ProgressBars
from ..runtime.settings import SettingError, require
from ..runtime.unread_variables import unread_variables
from ..stack import cluster_record
from ..stack.fork_servers import ForkServers, fork_servers
from ..stack.memory_shares import StartedModel
from ..stack.settings import StackSettings
from ..stack.stack_error import StackError

INTERRUPTED = 130


def up(settings: StackSettings, console: Console) -> int:
    """Runs until a signal; the exit status. Raises what pulling a model and starting a cluster
    raise."""
    began = time.monotonic()
    signal.signal(signal.SIGTERM, _interrupt)
    for sentence in unread_variables():
        console.print(f"[yellow]{shown(sentence)}", soft_wrap=True)
    # An engine would say so when the model is there, and other stages run.
    if settings.device == "cuda" and settings.executor != "simulated" and not has_gpu_driver():
        raise SettingError("device", settings.device, "a device of this machine, or auto")
    with own_state_folder(settings.state_dir), fork_servers(settings) as forks:
        settings, models = pulled(settings, console)
        for model in models:
            if rounding := ModelManifest.read(model.folder).rounding:
                console.print(shown(rounding))
        return asyncio.run(_run(settings, models, console, began, forks))


def pulled(settings: StackSettings, console: Console) -> tuple[StackSettings, list[StartedModel]]:
    """The settings with a draft model's folder, and the models, the first one first. Raises what
    pulling a model raises, and `SettingError` for two of one name."""
    with ProgressBars(console) as bars:
        pull = partial(
            model_store.pull,
            cache_dir=settings.cache_dir,
            progress=bars.report,
            dtype=settings.dtype,
            device=settings.device,
        )
        models = []
        for place in read_places(settings.model):
            folder = pull(
                place.place,
                revision=settings.revision,
                quantization=settings.quantization,
                calibration=settings.calibration,
                model_code=settings.model_code,
            )
            name = place.name or settings.served_model_name
            models.append(StartedModel.of(folder, name))
        if settings.draft_model is not None:
            settings = replace(settings, draft_model=str(pull(settings.draft_model)))
    names = [model.name for model in models]
    allowed = "models with names of their own, as NAME=MODEL"
    require(len(set(names)) == len(names), "model", ", ".join(names), allowed)
    return settings, models


async def _run(
    settings: StackSettings,
    models: list[StartedModel],
    console: Console,
    began: float,
    forks: ForkServers,
) -> int:
    # Servers of forks import beside this process: they are started before it imports what NATS and
    # HTTP take.
    from ..stack.local_stack import LocalStack  # noqa: PLC0415

    stopping = asyncio.Event()
    stack = LocalStack(
        settings,
        models,
        report=lambda what: console.print(f"[yellow]{shown(what)}"),
        forks=forks,
    )
    _on_signals(stopping, stack.hurry)
    try:
        with ProgressBars(console) as bars:
            if not await _unless(stopping, stack.start(bars.report)):
                return INTERRUPTED
        assert stack.record is not None
        _print_record(console, stack.record, settings, time.monotonic() - began)
        if len(models) > 1:
            names = ", ".join(model.name for model in models[1:])
            console.print(f"beside it: [bold]{shown(names)}[/]\n")
        await _unless(stopping, stack.run())
        console.print("stopping: running answers may end (Ctrl-C again: at once)")
        return 0
    finally:
        await stack.stop()


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _on_signals(stopping: asyncio.Event, hurry: asyncio.Event) -> None:
    """The first signal sets `stopping`, the second one `hurry`."""

    def on_signal() -> None:
        (hurry if stopping.is_set() else stopping).set()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # Under nohup the cluster survives the end of its terminal.
        if number is not signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
            asyncio.get_running_loop().add_signal_handler(number, on_signal)


async def _unless(event: asyncio.Event, work: Coroutine[Any, Any, None]) -> bool:
    """Runs `work` to its end, or cancels it when `event` is set; whether it came to its end."""
    task = asyncio.ensure_future(work)
    waiting = asyncio.ensure_future(event.wait())
    await asyncio.wait((task, waiting), return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    if not task.done():
        task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    return not task.cancelled()


@contextlib.contextmanager
def own_state_folder(folder: Path) -> Iterator[None]:
    """Locks the state folder for one cluster; the lock ends with this process. Raises
    `SettingError` where the folder cannot be made."""
    try:
        own_folder(folder)
        file = (folder / "lock").open("w")
    except OSError as failure:
        allowed = f"a folder that this user can make and write to ({failure.strerror})"
        raise SettingError("state_dir", str(folder), allowed) from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            allowed = "choose another with --state-dir"
            raise StackError(f"a cluster runs with the state folder {folder}; {allowed}") from None
        # Of a cluster that was killed: its process id may be this process's now, as in a container.
        cluster_record.remove_cluster(folder)
        yield


def _print_record(
    console: Console, line: cluster_record.ClusterRecord, settings: StackSettings, seconds: float
) -> None:
    rules = settings.rules
    number = (
        str(rules.max_replicas)
        if rules.min_replicas == rules.max_replicas
        else f"{rules.min_replicas} to {rules.max_replicas}"
    )
    replicas = f"{number} replica{'s' if rules.max_replicas > 1 else ''}"
    console.print(
        f"\n[bold green]ready[/] in {seconds:.1f} s: [bold]{shown(line.model)}[/] on {replicas}\n"
    )
    command = "headwater" if shutil.which("headwater") else os.path.relpath(sys.argv[0])
    body = {
        "model": line.model,
        "stream": True,
        "messages": [{"role": "user", "content": "What is a headwater?"}],
    }
    needs_key = settings.api_key_file is not None or settings.has_admins
    key = "-H 'authorization: Bearer YOUR_KEY' " if needs_key else ""
    header = f"-H 'content-type: application/json' {key}"
    own_key = " --api-key YOUR_KEY" if needs_key else ""
    rows = {
        "page": f"{line.rest}/",
        "REST": f"{line.rest}/v1",
        "gRPC": line.grpc,
        "curl": f"curl -N {line.rest}/v1/chat/completions {header}-d '{json.dumps(body)}'",
        "chat": f"{command} chat --base-url {line.rest}/v1{own_key}",
        "logs": str(settings.state_dir / "logs"),
    }
    if settings.has_admins:
        rows["keys"] = f"{command} tenant add NAME --base-url {line.rest}{_admin_key(settings)}"
    for name, value in rows.items():
        console.print(f"  [cyan]{name}[/]  {shown(value)}", soft_wrap=True, highlight=False)
    console.print("\nCtrl-C stops everything.\n")


def _admin_key(settings: StackSettings) -> str:
    """Flag by which a command finds an administrator's key; the variable needs none."""
    if settings.admin_key_file is None:
        return ""
    return f" --admin-key-file {shlex.quote(str(settings.admin_key_file.absolute()))}"
