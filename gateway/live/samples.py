"""Figures of this gateway over the last hours, in memory: one sample every half minute, kept in a
ring. They end with the process; those of other gateways stay."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

import msgspec

from headwater.services.runtime.tasks import owned_task

from ..request.cluster import Cluster
from .gateway_figures import cluster_totals

SAMPLE_SECONDS = 30
MAX_SAMPLES = 6 * 3600 // SAMPLE_SECONDS
"""Six hours, 60 kB."""
EARLY_SECONDS = 1.0
"""Most seconds by which a timer comes early."""


class Sample(msgspec.Struct, frozen=True, array_like=True):
    """Figures of one half minute, whose number counts from 1970."""

    number: int
    num_running: float
    num_waiting: float
    output_tokens: float = 0.0
    prompt_tokens: float = 0.0
    cached_tokens: float = 0.0
    num_finished: float = 0.0
    num_refused: float = 0.0


class Samples:
    """Samples of one gateway. Use within `running`."""

    def __init__(self, read: Callable[[], dict[str, float]]) -> None:
        """`read`: totals as of now, counted from the gateway's start."""
        self._read = read
        self._before = read()
        self._kept: deque[Sample] = deque(maxlen=MAX_SAMPLES)

    @classmethod
    @contextlib.asynccontextmanager
    async def running(cls, cluster: Cluster) -> AsyncIterator[Samples]:
        samples = cls(lambda: cluster_totals(cluster))
        async with owned_task(samples._follow()):
            yield samples

    def all(self) -> list[Sample]:
        return list(self._kept)

    def take(self, number: int) -> None:
        """Keeps a sample of what has happened since the one before, in place of those that a clock
        which was set back repeats."""
        now = self._read()
        grown = {name: max(0.0, now[name] - self._before.get(name, 0.0)) for name in now}
        self._before = now
        while self._kept and self._kept[-1].number >= number:
            self._kept.pop()
        self._kept.append(
            Sample(
                number=number,
                num_running=now["num_running"],
                num_waiting=now["num_waiting"],
                output_tokens=grown["output_tokens"],
                prompt_tokens=grown["prompt_tokens"],
                cached_tokens=grown["cached_tokens"],
                num_finished=grown["num_finished"],
                num_refused=grown["num_refused"],
            )
        )

    async def _follow(self) -> None:
        while True:
            number, seconds = next_sample(time.time())
            await asyncio.sleep(seconds)
            self.take(number)


def next_sample(now: float) -> tuple[int, float]:
    """Number of the half minute that ends next, and the seconds until then. `now` may be a little
    before the end of one that was taken, as a timer may come, or hours back, where a clock was set
    back."""
    number = int((now + EARLY_SECONDS) // SAMPLE_SECONDS) + 1
    return number, number * SAMPLE_SECONDS - now


def merged(gateways: Iterable[Iterable[Sample]]) -> list[dict[str, Any]]:
    """Rows of the samples of all gateways, oldest first: sums, as rates a second."""
    sums: dict[int, list[float]] = {}
    for each in gateways:
        for sample in each:
            number, *values = msgspec.structs.astuple(sample)
            before = sums.get(number, [0.0] * len(values))
            sums[number] = [a + b for a, b in zip(before, values, strict=True)]
    return [_row(Sample(number, *sums[number])) for number in sorted(sums)[-MAX_SAMPLES:]]


def _row(sample: Sample) -> dict[str, Any]:
    rates = {
        name: round(getattr(sample, name) / SAMPLE_SECONDS, 3)
        for name in ("output_tokens", "num_finished", "num_refused")
    }
    share = sample.cached_tokens / sample.prompt_tokens if sample.prompt_tokens else None
    return {
        "at": sample.number * SAMPLE_SECONDS,
        "num_running": sample.num_running,
        "num_waiting": sample.num_waiting,
        **rates,
        "cached_share": share,
    }
