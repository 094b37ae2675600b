"""Measures a gateway's cost of knowing the caches of very many replicas: memory, time of a
decision, CPU time of events.

`headwater bench index-events`: synthetic publishers in this process. `--live`: they publish over a
NATS server from a process of their own, faster and faster, until the gateway's core no longer keeps
up and reads Redis through.
"""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import random
import time
from typing import Annotated

import numpy as np
import typer

from headwater.engine_core.kv.prefix_hash import block_hashes
from headwater.gateway.router.router import Router
from headwater.proto.events_pb2 import KvEventBatch
from headwater.services.index.feed import IndexFeed
from headwater.services.index.kv_index import KvIndex
from headwater.services.runtime.bus import Bus
from headwater.services.runtime.member import Kind
from headwater.services.runtime.membership import Members
from headwater.services.runtime.process import configure_logging
from headwater.services.runtime.store import Store

from .figures import AsJson, show_rows
from .live_events import Row, live
from .processes import resident_bytes
from .program import run_program
from .routing_decision import timed_decision
from .synthetic_publishers import BLOCKS_PER_BATCH, MODEL, SyntheticPublisher, publishers

NUM_TOKENS = 8192
HELD_BYTES = 57
"""Bytes of a publisher's memory for each block: a string of 16 bytes and its place in a queue."""


def measure(num_replicas: int, num_blocks: int, decisions: int) -> Row:
    """Measures in one thread and without a network, on an index of its own."""
    configure_logging("bench", "error")
    members = Members(Bus(None), (Kind.ENGINE,))
    feed = IndexFeed(Bus(None), members, Store(None))
    router = Router(Bus(None), members, feed)
    index = feed.index(MODEL.key)
    published = publishers(num_replicas, num_blocks)
    for each in published:
        members.on_member(each.member, from_bus=True)
        index.publish(index.open(each.replica_id, each.member.epoch), 0)
    gc.collect()
    before = resident_bytes(os.getpid())
    for _ in range(num_blocks // num_replicas // BLOCKS_PER_BATCH):
        for each in published:
            index.apply(KvEventBatch.FromString(each.batch()))
    known = len(index)
    memory = resident_bytes(os.getpid()) - before - known * HELD_BYTES
    wall, cpu = np.percentile(
        asyncio.run(_decide(router, published, decisions)), (50, 99), axis=0
    ).T
    rate = _events_per_second(index, published)
    return {
        "replicas": num_replicas,
        "index_blocks": known,
        "memory_mib": round(memory / 2**20),
        "bytes_a_block": round(memory / known),
        "decision_ms_p50_p99": (wall * 1e3).round(2).tolist(),
        "decision_cpu_ms_p50_p99": (cpu * 1e3).round(2).tolist(),
        "blocks_a_second_of_cpu": round(rate),
        "core_share_at_1000_a_replica": round(num_replicas * 1000 / rate, 3),
    }


def _events_per_second(
    index: KvIndex, published: list[SyntheticPublisher], num_batches: int = 5000
) -> float:
    """Number of blocks stored, with as many removed, by CPU second of parsing and applying."""
    rng = random.Random(0)
    payloads = [rng.choice(published).batch() for _ in range(num_batches)]
    started = time.thread_time()
    for payload in payloads:
        index.apply(KvEventBatch.FromString(payload))
    return num_batches * BLOCKS_PER_BATCH / (time.thread_time() - started)


async def _decide(
    router: Router, published: list[SyntheticPublisher], number: int
) -> list[tuple[float, float]]:
    """Seconds of each decision, and of CPU time; every other prompt's first half is cached
    somewhere."""
    rng = random.Random(0)
    seconds = []
    # As a gateway does once it is up.
    gc.collect()
    gc.freeze()
    async with router.running():
        for turn in range(number):
            tokens = np.random.default_rng(turn).integers(0, MODEL.vocab_size, NUM_TOKENS)
            hashes = block_hashes(b"\0" * 16, tokens.astype(np.int32), MODEL.block_size)
            if turn % 2:
                router._feed.index(MODEL.key).expect(
                    rng.choice(published).replica_id, hashes[: len(hashes) // 2], 60.0
                )
            wall, cpu, _ = timed_decision(router, MODEL.key, b"".join(hashes), NUM_TOKENS)
            seconds.append((wall, cpu))
    return seconds


def main(
    replicas: Annotated[
        list[int] | None, typer.Option(help="how many publish (repeatable)")
    ] = None,
    blocks: Annotated[int, typer.Option(help="that they cache together")] = 1_000_000,
    decisions: Annotated[int, typer.Option(help="of each measurement")] = 400,
    over_nats: Annotated[bool, typer.Option("--live", help="over NATS, faster and faster")] = False,
    as_json: AsJson = False,
) -> None:
    """Memory, decisions and events of a gateway with very many replicas."""
    configure_logging("bench", "error")
    rows = []
    for number in replicas or (100, 300, 1000):
        rows.append(
            asyncio.run(live(number, blocks)) if over_nats else _apart(number, blocks, decisions)
        )
    show_rows(rows, "an index of very many replicas", as_json=as_json)


def _apart(number: int, blocks: int, decisions: int) -> Row:
    """Runs a function in a process of its own, whose memory is unused."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(measure, (number, blocks, decisions))


if __name__ == "__main__":
    run_program(main)
