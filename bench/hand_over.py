"""`headwater bench hand-over`: what it takes to move keys and values from one engine to another,
and whether roles pay.

- `pull`: a prompt that one engine has computed is asked of another one, which copies its blocks;
  beside it the time in which that engine computes a prompt of the same length, and answers one that
  it has.
- `mixes`: one cluster whose engines do everything and one whose engines have roles, under the same
  arrivals: the share of requests that keep both objectives.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console

from headwater.proto import engine_pb2 as pb
from headwater.proto import engine_pb2_grpc
from headwater.proto.common_pb2 import Sampling
from headwater.services.runtime import cluster_key
from headwater.services.runtime.channel import open_channel
from headwater.services.stack.cluster_record import ClusterRecord
from headwater.services.stack.token_file import key_of_cluster

from . import arrivals, datasets, dummy_model
from .own_cluster import engine_metrics, own_cluster, wait_until_prepared
from .program import run_program
from .serve_workers import drive
from .sse_client import Outcome
from .workloads import MODELS, TINY

PARTS = ("pull", "mixes")
MOST_TTFT = 1.0
MOST_GAP = 0.030
"""Seconds to the first token, and between two tokens for 99 of 100 of them, that a request is to
keep."""
LOAD = 0.8
"""Share of the requests a second that engines without roles complete when they have as many as they
can take."""
SETTLE_SECONDS = 60.0

console = Console(stderr=True)


@dataclass(frozen=True, slots=True)
class Mix:
    prompt_len: int
    output_len: int
    concurrency: int
    """Requests at once that keep two engines busy."""

    @property
    def name(self) -> str:
        return f"{self.prompt_len}/{self.output_len}"


MIXES = (
    Mix(8192, 16, 16),
    Mix(8192, 256, 64),
    Mix(2048, 256, 128),
    Mix(512, 512, 256),
    Mix(32768, 512, 16),
    Mix(128, 1024, 256),
)
"""A prompt and an answer each, in tokens."""


def main(
    part: Annotated[
        list[str] | None, typer.Option(help=f"{', '.join(PARTS)}; repeatable; none: all")
    ] = None,
    model: Annotated[str, typer.Option(help="of the workloads: " + ", ".join(MODELS))] = "qwen3-8b",
    tokens: Annotated[
        list[int] | None, typer.Option(help="of prompts that are pulled; repeatable")
    ] = None,
    mix: Annotated[
        list[str] | None,
        typer.Option(help=f"{', '.join(each.name for each in MIXES)}; repeatable; none: all"),
    ] = None,
    up: Annotated[
        list[str] | None,
        typer.Option(help="flag of `headwater up`; repeatable: --up=--device=cuda"),
    ] = None,
    runs: Annotated[int, typer.Option(help="prompts of each length that are pulled")] = 5,
    seconds: Annotated[float, typer.Option(help="of arrivals of each mix")] = 12.0,
    workers: Annotated[int, typer.Option(help="client processes")] = 4,
    dry_run: Annotated[bool, typer.Option(help="short prompts and a tiny model")] = False,
) -> None:
    """Measure pulls between two engines, and engines with roles beside engines without."""
    if unknown := set(part or ()) - set(PARTS):
        raise typer.BadParameter(
            f"part is {', '.join(sorted(unknown))}; allowed: {', '.join(PARTS)}"
        )
    mixes = [each for each in MIXES if not mix or each.name in mix]
    if not mixes:
        raise typer.BadParameter(
            f"mix is {', '.join(mix or ())}; allowed: {', '.join(each.name for each in MIXES)}"
        )
    if dry_run:
        mixes = [Mix(64, 8, 2)]
        tokens = [256]
        seconds = 2.0
    flags = ["--load-format=dummy", "--kv-peer-memory=536870912", *(up or ())]
    with tempfile.TemporaryDirectory(prefix="headwater-model-") as folder:
        dummy_model.write(model, TINY if dry_run else MODELS[model], Path(folder))
        flags.append(f"--model={folder}")
        if "pull" in (part or PARTS):
            for row in pulls([*flags, "--replicas=2"], tokens or [8192, 30_000], runs):
                print(json.dumps(row), flush=True)
        if "mixes" in (part or PARTS):
            for row in measured_mixes(flags, mixes, seconds, workers):
                print(json.dumps(row), flush=True)


@contextmanager
def prepared_cluster(flags: Sequence[str]) -> Iterator[tuple[ClusterRecord, Path]]:
    with own_cluster(flags) as (cluster, folder):
        if not wait_until_prepared(cluster, SETTLE_SECONDS):
            console.print("[yellow]not prepared: what is missing is made under load")
        yield cluster, folder


def pulls(flags: Sequence[str], lengths: Sequence[int], runs: int) -> Iterator[dict[str, Any]]:
    with prepared_cluster(flags) as (cluster, folder):
        addresses = [
            stage.addresses["grpc"] for stage in cluster.stages if stage.name.startswith("engine")
        ]
        with cluster_key.using(key_of_cluster(folder, os.environ)):
            for length in lengths:
                yield asyncio.run(pulled(addresses, length, runs))


async def pulled(addresses: Sequence[str], length: int, runs: int) -> dict[str, Any]:
    """Milliseconds to the first token of prompts: computed, pulled, and cached already; the median
    of each."""
    rng = np.random.default_rng(length)
    times = dict[str, list[float]]()
    async with open_channel(addresses[0]) as first, open_channel(addresses[1]) as second:
        owner = EngineCaller(first)
        puller = EngineCaller(second)
        holder = pb.Holder(address=addresses[0], epoch=await owner.epoch(), num_tokens=length)
        for _ in range(runs + 1):
            prompt = rng.integers(1000, 30_000, length).tolist()
            for name, caller, known in (
                ("computed", owner, None),
                ("pulled", puller, holder),
                ("cached", puller, None),
            ):
                seconds, cached = await caller.first_token(prompt, known)
                if name == "pulled" and cached.get("peer", 0) < length - 256:
                    raise SystemExit(
                        f"of {length} tokens came {cached}: is it sooner to compute them?"
                    )
                times.setdefault(name, []).append(1000 * seconds)
    # The first of each opens connections.
    middle = {f"{name}_ms": round(median(each[1:]), 2) for name, each in times.items()}
    return {
        "tokens": length,
        **middle,
        "pull_ms": round(middle["pulled_ms"] - middle["cached_ms"], 2),
    }


class EngineCaller:
    """One session with an engine."""

    def __init__(self, channel: Any) -> None:
        self._stub: Any = engine_pb2_grpc.EngineStub(channel)
        self._call = self._stub.Session()
        self._num_asked = 0

    async def epoch(self) -> int:
        info = await self._stub.Info(pb.InfoRequest())
        return int(info.incarnation.epoch)

    async def first_token(
        self, prompt: Sequence[int], holder: pb.Holder | None
    ) -> tuple[float, dict[str, int]]:
        """Seconds to the only token of a request, and its cached tokens by tier."""
        self._num_asked += 1
        add = pb.Add(
            stream_ids=[self._num_asked],
            num_prompt_tokens=len(prompt),
            prompt_ids=prompt,
            sampling=Sampling(temperature=0.0, max_tokens=1),
            cache_namespace=bytes(16),
            credit=1,
            holder=holder,
        )
        began = time.perf_counter()
        cached = dict[str, int]()
        await self._call.write(pb.ClientFrame(adds=[add]))
        while True:
            frame = await self._call.read()
            for start in frame.starts:
                cached = dict(start.cached_by_tier)
            if any(finish.stream_id == self._num_asked for finish in frame.finishes):
                return time.perf_counter() - began, cached


def measured_mixes(
    flags: Sequence[str], mixes: Sequence[Mix], seconds: float, workers: int
) -> Iterator[dict[str, Any]]:
    rates: dict[Mix, float] = {}
    for name, more in (
        ("together", ["--replicas=2"]),
        ("split", ["--prefill-replicas=1", "--decode-replicas=1"]),
    ):
        with prepared_cluster([*flags, *more]) as (cluster, _):
            for mix in mixes:
                if mix not in rates:
                    rates[mix] = LOAD * capacity(cluster, mix, seconds, workers)
                before = counters(cluster)
                figures = under_load(cluster, mix, rates[mix], seconds, workers)
                moved = {
                    each: int(value - before[each]) for each, value in counters(cluster).items()
                }
                yield {"engines": name, "mix": mix.name, **figures, **moved}


def counters(cluster: ClusterRecord) -> dict[str, float]:
    """Tokens that engines have pulled, and the parts of them that were prefetched and copied
    directly."""
    found = dict.fromkeys(("pulled", "prefetched", "pulled_directly"), 0.0)
    for text in engine_metrics(cluster):
        for name in found:
            found[name] += sum(
                map(float, re.findall(rf"^headwater_kv_{name}_tokens_total\S* (\S+)$", text, re.M))
            )
    return found


def capacity(cluster: ClusterRecord, mix: Mix, seconds: float, workers: int) -> float:
    """Requests a second that the engines complete, a fixed number at once."""
    number = mix.concurrency
    _, took = drive(cluster.rest, prompts(cluster, mix, number), None, number, workers, quiet=True)
    if took > seconds / 2:
        return number / took
    # Where that was over soon, the beginning and the end weigh too much.
    more = min(int(number * seconds / took), 4 * number)
    _, took = drive(cluster.rest, prompts(cluster, mix, more), None, number, workers, quiet=True)
    return more / took


def under_load(
    cluster: ClusterRecord, mix: Mix, rate: float, seconds: float, workers: int
) -> dict[str, Any]:
    number = max(8, int(rate * seconds))
    offsets = arrivals.poisson(number, rate, np.random.default_rng(7)).tolist()
    outcomes, took = drive(
        cluster.rest, prompts(cluster, mix, number), offsets, number, workers, quiet=True
    )
    good = [each for each in outcomes if is_good(each)]
    gaps = [gap for each in outcomes for gap in each.gaps]
    firsts = [each.ttft for each in outcomes if not each.error]
    return {
        "requests": number,
        "requests_per_s": round(rate, 3),
        "failed": sum(bool(each.error) for each in outcomes),
        # By the rate of arrivals: how long the last answers take is no part of it.
        "goodput_per_s": round(len(good) / number * rate, 3),
        "good_share": round(len(good) / number, 3),
        "ttft_p50_ms": round(1000 * float(np.percentile(firsts, 50)), 1),
        "ttft_p99_ms": round(1000 * float(np.percentile(firsts, 99)), 1),
        "itl_p50_ms": round(1000 * float(np.percentile(gaps, 50)), 2) if gaps else 0.0,
        "itl_p99_ms": round(1000 * float(np.percentile(gaps, 99)), 2) if gaps else 0.0,
        "tokens_per_s": round(sum(each.completion_tokens for each in outcomes) / took, 1),
    }


def prompts(cluster: ClusterRecord, mix: Mix, number: int) -> list[Any]:
    shape = datasets.Shape(
        prompt_len=mix.prompt_len, output_len=mix.output_len, vocab_size=30_000, model=cluster.model
    )
    return list(datasets.random_prompts(number, shape, np.random.default_rng()))


def is_good(outcome: Outcome) -> bool:
    """Whether a request kept both objectives."""
    late = float(np.percentile(outcome.gaps, 99)) if outcome.gaps else 0.0
    return not outcome.error and outcome.ttft <= MOST_TTFT and late <= MOST_GAP


if __name__ == "__main__":
    run_program(main)
