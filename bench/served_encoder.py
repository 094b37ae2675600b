"""`headwater bench served-encoder`: latencies of texts that are embedded at once by a deployment,
beside those of the same engine in this process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import httpx
import numpy as np
import torch
import typer

from headwater.services.models.manifest import ModelManifest
from headwater.services.models.store import default_cache_dir, pull
from headwater.services.runtime.progress import silent

from .encoders import Subject, Texts, random_texts
from .figures import AsJson, show_rows
from .own_cluster import own_cluster
from .program import run_program

MODEL = "all-minilm-l6-v2"
ANSWER_SECONDS = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Latencies:
    """Latencies of texts at a number of concurrent requests."""

    where: str
    at_once: int
    p50_ms: float
    p99_ms: float
    texts_per_second: float

    @classmethod
    def of(cls, where: str, at_once: int, seconds: Sequence[float], wall: float) -> Latencies:
        p50, p99 = np.percentile(seconds, [50, 99]) * 1e3
        return cls(
            where=where,
            at_once=at_once,
            p50_ms=round(float(p50), 1),
            p99_ms=round(float(p99), 1),
            texts_per_second=round(len(seconds) / wall, 1),
        )


def in_process(subject: Subject, texts: Texts, at_once: int) -> Latencies:
    """Latencies of texts that are embedded in one process, `at_once` at a time."""
    began = time.perf_counter()
    seconds = subject.latencies(texts, at_once)
    return Latencies.of("in process", at_once, seconds, time.perf_counter() - began)


async def served(url: str, model: str, texts: Texts, at_once: int) -> Latencies:
    """Like `in_process`, of a deployment."""
    waiting = iter(texts)
    seconds: list[float] = []
    limits = httpx.Limits(max_connections=at_once)
    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=ANSWER_SECONDS) as client:

        async def ask() -> None:
            for text in waiting:
                body = {"model": model, "input": text, "encoding_format": "base64"}
                started = time.perf_counter()
                reply = await client.post("/v1/embeddings", json=body)
                reply.raise_for_status()
                seconds.append(time.perf_counter() - started)

        began = time.perf_counter()
        await asyncio.gather(*(ask() for _ in range(at_once)))
        return Latencies.of("served", at_once, seconds, time.perf_counter() - began)


def main(
    texts: Annotated[int, typer.Option(help="Texts of a round.")] = 512,
    at_once: Annotated[int, typer.Option(help="Texts that are asked for at once.")] = 64,
    rounds: Annotated[int, typer.Option(help="Rounds in turn.")] = 3,
    threads: Annotated[int, typer.Option(help="Threads of both.")] = 2,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    as_json: AsJson = False,
) -> None:
    """Embeds texts of 16 to 256 tokens with all-MiniLM-L6-v2 on a CPU, in this process and by a
    deployment that is started for it."""
    torch.set_num_threads(threads)
    folder = pull(MODEL, cache_dir=default_cache_dir(), progress=silent, dtype=dtype, device="cpu")
    asked = random_texts(texts, ModelManifest.read(folder).vocab_size)
    subject = Subject(folder, threads)
    flags = (f"--model={MODEL}", f"--dtype={dtype}", "--device=cpu", "--replicas=1")
    rows = []
    with own_cluster(flags) as (cluster, _):
        in_process(subject, asked[:at_once], at_once)
        asyncio.run(served(cluster.rest, MODEL, asked[:at_once], at_once))
        for _ in range(rounds):
            rows.append(in_process(subject, asked, at_once))
            rows.append(asyncio.run(served(cluster.rest, MODEL, asked, at_once)))
    show_rows(rows, f"{MODEL}, {texts} texts, rounds in turn", as_json=as_json)


if __name__ == "__main__":
    run_program(main)
