"""Measures the prefix index in Redis: blocks written a second, bytes a block, time of a look-up
over MGET.

`python -m headwater.bench.prefix_index`; starts the embedded server, or fills and empties
`--redis-url`.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Annotated

import typer

from headwater.services.index.column import IndexColumn, Owner
from headwater.services.index.reader import IndexReader
from headwater.services.index.reaper import Reaper
from headwater.services.runtime.process import configure_logging
from headwater.services.runtime.store import Store
from headwater.services.stack.embedded import start_valkey

from .figures import AsJson, show_figures
from .program import run_program
from .synthetic_publishers import MODEL as SYNTHETIC

PROMPT_BLOCKS = 512
MODEL = replace(
    SYNTHETIC, name="bench/prefix-index", dtype="float32", block_size=16, kv_format="float32"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Figures of one writer after the other; the server shares the machine."""

    num_replicas: int
    blocks_per_replica: int
    stored_per_second: int
    removed_per_second: int
    bytes_first_replica: float
    """Bytes of Redis for a block that one replica caches."""
    bytes_next_replica: float
    """Additional bytes for each further replica that caches it too."""
    reaped_per_second: int
    lookup_ms: float
    """Milliseconds of a look-up of 512 blocks that are all cached."""


async def measure(url: str, num_replicas: int, num_blocks: int) -> Measurement:
    async with Store.open(url) as store:
        rng = random.Random(1)
        blocks = [rng.randbytes(16) for _ in range(num_blocks)]
        columns = [_column(store, number) for number in range(num_replicas)]
        memory = [await _used_memory(store)]
        seconds = list[float]()
        for column in columns:
            for block in blocks:
                column.add(block)
            seconds.append(await _timed_write(column))
            memory.append(await _used_memory(store))
        lookup = await _lookup_seconds(store, blocks[:PROMPT_BLOCKS])
        for block in blocks[: num_blocks // 2]:
            columns[0].drop(block)
        removing = await _timed_write(columns[0])
        reaping = await _reap(store, columns)
    first = memory[1] - memory[0]
    following = (memory[-1] - memory[1]) / max(1, num_replicas - 1)
    return Measurement(
        num_replicas=num_replicas,
        blocks_per_replica=num_blocks,
        stored_per_second=round(num_blocks / median(seconds)),
        removed_per_second=round(num_blocks // 2 / removing),
        bytes_first_replica=round(first / num_blocks, 1),
        bytes_next_replica=round(following / num_blocks, 1),
        reaped_per_second=round((num_replicas - 0.5) * num_blocks / reaping),
        lookup_ms=round(lookup * 1000, 2),
    )


def _column(store: Store, number: int) -> IndexColumn:
    owner = Owner(
        replica_id=f"replica-{number}", epoch=number + 1, address=f"127.0.0.1:{number}", capacity=0
    )
    return IndexColumn(store, MODEL.key, 0, owner)


async def _timed_write(column: IndexColumn) -> float:
    start = time.perf_counter()
    await column.write()
    return time.perf_counter() - start


async def _used_memory(store: Store) -> int:
    return int((await store.command("INFO", "memory"))["used_memory"])


async def _lookup_seconds(store: Store, blocks: list[bytes]) -> float:
    reader = IndexReader(store, seconds=1.0)
    seconds = []
    for _ in range(50):
        start = time.perf_counter()
        matched = await reader.matched(MODEL, blocks)
        seconds.append(time.perf_counter() - start)
        assert set(matched.values()) == {len(blocks)}
    return median(seconds)


async def _reap(store: Store, columns: list[IndexColumn]) -> float:
    for column in columns:
        await column.leave()
    start = time.perf_counter()
    await Reaper(store, MODEL.key, 1).reap()
    return time.perf_counter() - start


@contextlib.asynccontextmanager
async def _server(url: str) -> AsyncIterator[str]:
    if url:
        yield url
        return
    with tempfile.TemporaryDirectory() as folder:
        server = await start_valkey(Path(folder))
        try:
            yield server.url
        finally:
            await server.stop()


async def _run(url: str, num_replicas: int, num_blocks: int) -> Measurement:
    async with _server(url) as found:
        return await measure(found, num_replicas, num_blocks)


def main(
    num_replicas: Annotated[int, typer.Option(help="Replicas that cache the same blocks.")] = 8,
    num_blocks: Annotated[int, typer.Option(help="Blocks of each.")] = 50_000,
    redis_url: Annotated[
        str, typer.Option(help="A server to use instead of the embedded one.")
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Cost of the prefix index in Redis."""
    configure_logging("bench", "warning")
    row = asyncio.run(_run(redis_url, num_replicas, num_blocks))
    show_figures(asdict(row), "prefix index in Redis", as_json=as_json)


if __name__ == "__main__":
    run_program(main)
