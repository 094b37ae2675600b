"""`headwater bench model-trace`: big and small models of one device, asked for by a Zipf trace:
goodput of one deployment whose models take turns, beside that of a deployment started for each
model that is asked for.

Both get the same requests and the same memory, and as many models as it holds are up before the
trace begins. A separate deployment stays until another one needs its memory: the least recently
used one without requests ends first. A request of a model that runs waits for no other model.
On a GPU weights are dummies, made on the device; on a CPU models are tiny.
"""

from __future__ import annotations

import asyncio
import math
import os
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console

from headwater.services.runtime.hardware import resolve_device

from . import arrivals
from .figures import AsJson, show_rows
from .model_folders import CACHE_BYTES, ModelFolders
from .own_cluster import own_cluster
from .program import check_choice, run_program
from .separate_starts import SeparateStarts
from .sse_client import Outcome, ServerLostError, SseConnection

SWAP_BYTES = 2 << 30
"""Host memory for prefixes of each model on a GPU."""
SECONDS = {"cuda": 240.0, "cpu": 20.0}
TOKEN_IDS = (1000, 40_000)

Use = Callable[[str], AbstractAsyncContextManager[str]]
"""Scope of a request for a model: inside, a deployment of the model answers at the address."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A request of the trace, `at` seconds from its begin."""

    at: float
    model: str
    prompt_ids: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Figures of a trace's requests; times in seconds."""

    how: str
    requests: int
    in_time: int
    """First tokens within the objective."""
    goodput_per_s: float
    ttft_p50: float | None
    ttft_p90: float | None
    failed: int
    not_begun: int
    """Requests that had no answer when the last one could no longer be in time."""


def zipf_trace(
    models: Sequence[str], seconds: float, rate: float, prompt_len: int, rng: np.random.Generator
) -> list[Asked]:
    """Poisson arrivals, `rate` a second; the model of rank k gets 1/k of the requests that the
    first one gets. Ranks and prompts are drawn."""
    weights = 1 / np.arange(1, len(models) + 1)
    ranked = rng.permutation(np.array(models))
    offsets = arrivals.poisson(math.ceil(2 * seconds * rate) + 10, rate, rng)
    names = rng.choice(ranked, len(offsets), p=weights / weights.sum())
    return [
        Asked(float(at), str(name), rng.integers(*TOKEN_IDS, prompt_len).tolist())
        for at, name in zip(offsets, names, strict=True)
        if at < seconds
    ]


async def play(
    asked: Sequence[Asked], use: Use, output_len: int, objective: float
) -> list[Outcome]:
    """Sends the trace's requests at their times. Returns the outcomes of those that ended before
    the last one could no longer begin in time. Raises what a start raises."""
    begin = time.monotonic()

    async def send(each: Asked) -> Outcome:
        await asyncio.sleep(begin + each.at - time.monotonic())
        sent_at = time.monotonic()
        body = {
            "model": each.model,
            "prompt": each.prompt_ids,
            "max_tokens": output_len,
            "ignore_eos": True,
        }
        try:
            async with use(each.model) as address:
                connection = await SseConnection.open(address)
                try:
                    outcome = await connection.call("/v1/completions", body, {})
                finally:
                    connection.close()
        except (ServerLostError, OSError) as lost:
            return Outcome(sent_at, error=str(lost))
        outcome.sent_at = sent_at
        return outcome

    tasks = [asyncio.create_task(send(each)) for each in asked]
    # Answers that begin in time are given as much time again to end.
    timeout = asked[-1].at + 2 * objective
    await asyncio.wait(tasks, timeout=timeout, return_when=asyncio.FIRST_EXCEPTION)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    return [task.result() for task in tasks if not task.cancelled()]


def row_of(
    how: str, num_asked: int, outcomes: Sequence[Outcome], seconds: float, objective: float
) -> Row:
    waits = [each.ttft for each in outcomes if each.first_at and not each.error]
    in_time = sum(wait <= objective for wait in waits)
    p50, p90 = np.percentile(waits, (50, 90)).round(3).tolist() if waits else (None, None)
    return Row(
        how=how,
        requests=num_asked,
        in_time=in_time,
        goodput_per_s=round(in_time / seconds, 3),
        ttft_p50=p50,
        ttft_p90=p90,
        failed=len(outcomes) - len(waits),
        not_begun=num_asked - len(outcomes),
    )


def main(
    device: Annotated[str, typer.Option(help="cpu, cuda or auto")] = "auto",
    big: Annotated[int, typer.Option(min=0, help="big models: 8B on a GPU")] = 4,
    small: Annotated[int, typer.Option(min=0, help="small models: 0.6B on a GPU")] = 6,
    seconds: Annotated[
        float | None, typer.Option(help="of the trace; default: 240 on a GPU, 20 on a CPU")
    ] = None,
    rate: Annotated[float, typer.Option(help="requests a second, of all models")] = 1.0,
    objective: Annotated[float, typer.Option(help="seconds to a first token in time")] = 5.0,
    prompt_len: Annotated[int, typer.Option(min=1, help="tokens")] = 512,
    output_len: Annotated[int, typer.Option(min=1, help="tokens")] = 16,
    resident: Annotated[
        float | None, typer.Option(help="GB for models together; default: those of 2.1 big ones")
    ] = None,
    seed: Annotated[int, typer.Option(help="of the trace")] = 0,
    up: Annotated[
        list[str] | None, typer.Option(help="flag of `headwater up`; repeatable: --up=--gateways=2")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare models in turns with separate starts under one Zipf trace."""
    name = resolve_device(device)
    check_choice("device", name, SECONDS)
    length = SECONDS[name] if seconds is None else seconds
    amounts = {
        "--rate": rate,
        "--seconds": length,
        "--objective": objective,
        "--resident": resident,
    }
    for flag, value in amounts.items():
        if value is not None and value <= 0:
            raise typer.BadParameter(f"{flag} is {value:g}; allowed: more than 0")
    if not big + small:
        raise typer.BadParameter("--big and --small are 0; allowed: one model at least")
    os.environ["HEADWATER_KV_CACHE_MEMORY"] = str(CACHE_BYTES[name])
    if name == "cuda":
        os.environ["HEADWATER_KV_SWAP_MEMORY"] = str(SWAP_BYTES)
    with tempfile.TemporaryDirectory(prefix="headwater-models-") as parent:
        models = ModelFolders(name, Path(parent), big, small)
        asked = zipf_trace(
            list(models.sizes), length, rate, prompt_len, np.random.default_rng(seed)
        )
        if not asked:
            raise typer.BadParameter(f"no request comes in {length:g} seconds")
        most_bytes = int((resident or 0) * 1e9) or int(2.1 * max(models.sizes.values()))
        flags = [*models.flags, *(up or ())]

        async def in_turns() -> list[Outcome]:
            places = [models.place(each) for each in models.sizes]
            gb = f"--resident={most_bytes / 1e9:.6f}"
            with own_cluster([*places, gb, *flags]) as (cluster, _):

                @asynccontextmanager
                async def use(_model: str) -> AsyncIterator[str]:
                    yield cluster.rest

                return await play(asked, use, output_len, objective)

        async def separately() -> list[Outcome]:
            def start(model: str, stack: ExitStack) -> str:
                given = [models.place(model), "--replicas=1", *flags]
                cluster, _ = stack.enter_context(own_cluster(given))
                return cluster.rest

            starts = SeparateStarts(start, models.sizes, most_bytes)
            try:
                # Models in turns are all up before the trace begins.
                await starts.fill(dict.fromkeys(each.model for each in asked))
                return await play(asked, starts.use, output_len, objective)
            finally:
                await starts.close()

        ways = {"in turns": in_turns, "separate starts": separately}
        rows = []
        for how, run in ways.items():
            with Console(stderr=True).status(how):
                outcomes = asyncio.run(run())
            rows.append(row_of(how, len(asked), outcomes, length, objective))
    title = f"{big} big and {small} small models on {name}, {most_bytes / 1e9:.3g} GB"
    show_rows(rows, title, as_json=as_json)


if __name__ == "__main__":
    run_program(main)
