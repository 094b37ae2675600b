"""Processes that send a load's requests and follow their answers."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import uvloop
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

from .datasets import Dialogue
from .sse_client import Outcome, ServerLostError, SseConnection

API_KEY = "HEADWATER_API_KEY"
"""Environment variable with the key that is sent, when there is one."""
START_SECONDS = 120.0
"""Seconds that the slowest worker is waited for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One worker's part of the load."""

    base_url: str
    dialogues: list[Dialogue]
    offsets: list[float] | None
    """Seconds after the start, one for each dialogue; None: closed loop."""
    concurrency: int
    """Number of dialogues at once in a closed loop."""
    headers: Mapping[str, str] = field(default_factory=dict)


def drive(
    base_url: str,
    dialogues: list[Dialogue],
    offsets: list[float] | None,
    concurrency: int,
    workers: int,
    *,
    quiet: bool,
    headers: Mapping[str, str] | None = None,
) -> tuple[list[Outcome], float]:
    """Sends every dialogue and returns the outcomes of all turns and the wall time from the first
    to the last. `headers` come with each request."""
    workers = max(
        1, min(workers, len(dialogues), concurrency if offsets is None else len(dialogues))
    )
    context = multiprocessing.get_context("spawn")
    done = context.Value("i", 0)
    next_dialogue = context.Value("i", 0)
    ready = context.Barrier(workers)
    processes = []
    pipes = []
    for worker in range(workers):
        share = Share(
            base_url=base_url,
            # A closed loop is one over all workers: whichever lane is free first takes the next
            # one.
            dialogues=dialogues if offsets is None else dialogues[worker::workers],
            offsets=None if offsets is None else offsets[worker::workers],
            concurrency=concurrency // workers + (worker < concurrency % workers),
            headers=headers or {},
        )
        reader, writer = context.Pipe(duplex=False)
        process = context.Process(
            target=_work, args=(share, writer, done, next_dialogue, ready), daemon=True
        )
        process.start()
        writer.close()
        processes.append(process)
        pipes.append(reader)
    _watch(done, len(dialogues), processes, quiet=quiet)
    outcomes = [outcome for pipe in pipes for outcome in pipe.recv()]
    for process in processes:
        process.join()
    return outcomes, max(outcome.last_at for outcome in outcomes) - min(
        outcome.sent_at for outcome in outcomes
    )


def _watch(done: Any, total: int, processes: list[Any], *, quiet: bool) -> None:
    columns = (
        "[progress.description]{task.description}",
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), disable=quiet) as progress:
        task = progress.add_task("requests", total=total)
        while done.value < total and any(process.is_alive() for process in processes):
            progress.update(task, completed=done.value)
            time.sleep(0.05)
        progress.update(task, completed=done.value)


def _work(share: Share, pipe: Connection, done: Any, next_dialogue: Any, ready: Any) -> None:
    # Processes take different times to start: without this the first would measure an idle server.
    ready.wait(START_SECONDS)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        pipe.send(runner.run(_send_all(share, done, next_dialogue)))
    pipe.close()


async def _send_all(share: Share, done: Any, next_dialogue: Any) -> list[Outcome]:
    idle: list[SseConnection] = []
    outcomes: list[Outcome] = []
    headers = dict(share.headers)
    if API_KEY in os.environ:
        headers["authorization"] = f"Bearer {os.environ[API_KEY]}"

    async def talk(dialogue: Dialogue) -> None:
        reply: str | None = None
        while (body := dialogue.next_body(reply)) is not None:
            outcome = await _call(share.base_url, idle, dialogue, body, headers)
            outcomes.append(outcome)
            if outcome.error:
                break
            reply = outcome.reply
        with done.get_lock():
            done.value += 1

    began = time.monotonic()
    if share.offsets is None:

        async def lane() -> None:
            while (number := _take(next_dialogue)) < len(share.dialogues):
                await talk(share.dialogues[number])

        await asyncio.gather(*(lane() for _ in range(share.concurrency)))
    else:

        async def later(offset: float, dialogue: Dialogue) -> None:
            await asyncio.sleep(began + offset - time.monotonic())
            await talk(dialogue)

        await asyncio.gather(*map(later, share.offsets, share.dialogues))
    for connection in idle:
        connection.close()
    return outcomes


def _take(counter: Any) -> int:
    """The next number, unique over all processes."""
    with counter.get_lock():
        counter.value += 1
        return int(counter.value) - 1


async def _call(
    base_url: str,
    idle: list[SseConnection],
    dialogue: Dialogue,
    body: dict[str, Any],
    headers: dict[str, str],
) -> Outcome:
    began = time.monotonic()
    try:
        connection = idle.pop() if idle else await SseConnection.open(base_url)
        outcome = await connection.call(
            dialogue.path, body, headers, keep_reply=dialogue.needs_reply
        )
    except (ServerLostError, OSError) as failure:
        return Outcome(began, began, time.monotonic(), error=str(failure))
    idle.append(connection)
    return outcome
