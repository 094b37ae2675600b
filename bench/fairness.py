"""Measures fair shares on a cluster of its own with simulated engines: one tenant sends far too
many requests, nine do not.

`share`: all tenants want more than there is; measures the share of each, and Jain's index of the
shares. `latency`: nine tenants send requests now and then; measures their time to first token, with
and without the tenth. The tenth sends many requests at a time, or few with many prompts and choices
each, which `latency` alone measures.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any

import httpx
import msgspec
import numpy as np
import typer

from headwater.services.stack.cluster_record import ClusterRecord

from .figures import AsJson, show_figures
from .own_cluster import own_cluster
from .program import run_program

NUM_NORMAL = 9
ABUSER = "abuser"
WARM_UP_SECONDS = 10.0
"""Seconds before measuring: the burst of the start is not shared between gateways yet, and takes
its time to be worked off."""


@dataclass(slots=True)
class Seen:
    """Figures of one run."""

    tokens: Counter[str] = field(default_factory=Counter)
    ttft: list[float] = field(default_factory=list)
    """Times to first token of the normal tenants, in seconds."""
    fair_ttft: list[float] = field(default_factory=list)
    """The part of them that was waiting for turn and seat, and being computed: the rest is the cost
    of the other stages and their machine."""
    num_failed: int = 0


@dataclass(frozen=True, slots=True)
class Shape:
    """Size of a tenant's requests, in tokens, prompts and choices."""

    prompt_len: int
    output_len: int
    prompts: int = 1
    choices: int = 1
    """Number of choices of each prompt. Only the abuser's requests have several prompts or
    choices."""

    @property
    def is_flood(self) -> bool:
        return self.prompts * self.choices > 1


class Load:
    """Sends requests to a cluster in tenants' names."""

    def __init__(self, cluster: ClusterRecord, client: httpx.AsyncClient, shape: Shape) -> None:
        self._cluster = cluster
        self._client = client
        self._shape = shape
        self.seen = Seen()
        self.since = 0.0

    async def send(self, tenant: str) -> None:
        body = {
            "model": self._cluster.model,
            "prompt": self._prompt(),
            "max_tokens": self._shape.output_len,
            "ignore_eos": True,
            "stream": True,
        }
        began = time.perf_counter()
        first = None
        headers = {"x-tenant": tenant, "x-headwater-receipt": "1"}
        last = ""
        async with self._client.stream(
            "POST", "/v1/completions", json=body, headers=headers
        ) as reply:
            self.seen.num_failed += reply.is_error
            async for text in reply.aiter_lines():
                if text.startswith("data: {"):
                    first = first or time.perf_counter()
                    last = text
        if first is None or time.perf_counter() < self.since:
            return
        self.seen.tokens[tenant] += self._shape.output_len
        if tenant != ABUSER and began >= self.since:
            self.seen.ttft.append(first - began)
            receipt = json.loads(last.removeprefix("data: "))["receipt"]
            waited = receipt["queue_seconds"] + receipt["engine_queue_seconds"]
            self.seen.fair_ttft.append(waited + receipt["prefill_seconds"])

    async def flood(self, tenant: str) -> None:
        """Sends one request with many prompts and choices. Its answer is not read as it comes, and
        its body is made in milliseconds: the client's cost is not part of the measurement."""
        shape = self._shape
        body = {
            "model": self._cluster.model,
            "prompt": np.random.randint(1000, 40_000, (shape.prompts, shape.prompt_len)).tolist(),
            "n": shape.choices,
            "max_tokens": shape.output_len,
            "ignore_eos": True,
        }
        headers = {"x-tenant": tenant, "content-type": "application/json"}
        content = msgspec.json.encode(body)
        reply = await self._client.post(
            "/v1/completions", content=content, headers=headers, timeout=None
        )
        self.seen.num_failed += reply.is_error

    async def ask_on(self, tenant: str) -> None:
        while True:
            await (
                self.flood(tenant)
                if tenant == ABUSER and self._shape.is_flood
                else self.send(tenant)
            )

    def _prompt(self) -> list[int]:
        return [random.randrange(1000, 40_000) for _ in range(self._shape.prompt_len)]

    async def ask_at(self, tenant: str, rate: float) -> None:
        async with asyncio.TaskGroup() as group:
            while True:
                await asyncio.sleep(random.expovariate(rate))
                group.create_task(self.send(tenant))


async def run(
    cluster: ClusterRecord, seconds: float, shape: Shape, *, workers: int, abuse: int, rate: float
) -> Seen:
    """Runs `workers` of each normal tenant in closed loops, or, with a `rate`, at that rate;
    `abuse` workers of the abuser."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=4)
    async with httpx.AsyncClient(base_url=cluster.rest, timeout=120, limits=limits) as client:
        load = Load(cluster, client, shape)
        load.since = time.perf_counter() + WARM_UP_SECONDS
        names = [f"normal-{i}" for i in range(NUM_NORMAL)]
        asking = [
            load.ask_at(name, rate) if rate else load.ask_on(name)
            for name in names
            for _ in range(workers)
        ]
        tasks = [
            asyncio.create_task(each)
            for each in (*asking, *(load.ask_on(ABUSER) for _ in range(abuse)))
        ]
        await asyncio.sleep(seconds + WARM_UP_SECONDS)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return load.seen


def jain(values: list[int]) -> float:
    """Jain's index. 1: all tenants get the same; 1/n: one gets everything."""
    return sum(values) ** 2 / (len(values) * sum(value * value for value in values))


def _shares(seen: Seen) -> dict[str, Any]:
    """Jain's index and the tokens of each tenant in the measured time, if there were any."""
    if not seen.tokens:
        return {}
    given = [seen.tokens[f"normal-{i}"] for i in range(NUM_NORMAL)] + [seen.tokens[ABUSER]]
    return {
        "jain": round(jain(given), 4),
        "tokens_of_normal": given[:-1],
        "tokens_of_abuser": given[-1],
    }


def _percentile(seconds: list[float], percent: int) -> float:
    return round(float(np.percentile(seconds, percent)), 4)


def main(
    seconds: Annotated[float, typer.Option(help="of each run")] = 15.0,
    gateways: Annotated[int, typer.Option(help="that share the tenants' virtual time")] = 3,
    seats: Annotated[int, typer.Option(help="requests that the engine runs at once")] = 32,
    step_ms: Annotated[
        float,
        typer.Option(
            help="time of an engine's step, long enough that the engine and not the client is "
            "the bottleneck"
        ),
    ] = 80.0,
    prefill_us: Annotated[float, typer.Option(help="what a prompt token adds to it")] = 0.0,
    prompt_len: Annotated[int, typer.Option(help="tokens")] = 64,
    output_len: Annotated[int, typer.Option(help="tokens")] = 48,
    abuse: Annotated[int, typer.Option(help="requests that the abuser has open at any time")] = 100,
    prompts: Annotated[
        int, typer.Option(help="prompts of each of them; more than one: latencies alone")
    ] = 1,
    choices: Annotated[
        int, typer.Option(help="choices of each of these prompts, in the same way")
    ] = 1,
    rate: Annotated[
        float, typer.Option(help="requests a second of each normal tenant, for latencies")
    ] = 0.3,
    as_json: AsJson = False,
) -> None:
    """Jain's index among ten tenants, and what an abuser does to the others' time to first
    token."""
    os.environ |= {
        "HEADWATER_MAX_NUM_SEQS": str(seats),
        "HEADWATER_SIMULATED_STEP_SECONDS": str(step_ms / 1e3),
    }
    os.environ["HEADWATER_SIMULATED_PREFILL_SECONDS"] = str(prefill_us / 1e6)
    flags = ["--executor=simulated", "--replicas=1", f"--gateways={gateways}", "--log-level=error"]
    with own_cluster(flags) as (cluster, _):
        shape = Shape(prompt_len, output_len, prompts, choices)
        workers = max(2, seats // NUM_NORMAL + 2)
        measure = partial(run, cluster, seconds, shape)
        share = (
            Seen()
            if shape.is_flood
            else asyncio.run(measure(workers=workers, abuse=abuse, rate=0.0))
        )
        alone, beside = (
            asyncio.run(measure(workers=1, abuse=each, rate=rate)) for each in (0, abuse)
        )
    if not (alone.ttft and beside.ttft):
        raise typer.BadParameter(
            "nobody was answered after the warm-up: fewer requests, or more seconds"
        )
    runs = {"alone": alone, "beside": beside}
    p50, p99 = ({name: _percentile(seen.ttft, q) for name, seen in runs.items()} for q in (50, 99))
    fair_p99 = {name: _percentile(seen.fair_ttft, 99) for name, seen in runs.items()}
    found = _shares(share) | {
        "requests": {name: len(seen.ttft) for name, seen in runs.items()},
        "ttft_p50_seconds": p50,
        "ttft_p99_seconds": p99,
        "ttft_p99_ratio": round(p99["beside"] / p99["alone"], 3),
        "wait_and_prefill_p99_seconds": fair_p99,
        "wait_and_prefill_p99_ratio": round(fair_p99["beside"] / fair_p99["alone"], 3),
        "failed": share.num_failed + alone.num_failed + beside.num_failed,
    }
    show_figures(found, "shares of ten tenants", as_json=as_json)


if __name__ == "__main__":
    run_program(main)
