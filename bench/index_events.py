"""Measures how many cached blocks a second one gateway core takes in, from so many replicas at once.

`headwater bench index-events`; messages as the bus hands them over, in one thread, CPU time.
"""

from __future__ import annotations

import random
import time
from typing import Annotated

import typer

from headwater.proto.events_pb2 import Incarnation, KvEventBatch, StoredBlocks
from headwater.services.index.kv_index import KvIndex

BLOCKS_PER_BATCH = 40


def batches(num_replicas: int, num_batches: int) -> list[bytes]:
    """Each stores new blocks of one of the replicas."""
    rng = random.Random(0)
    counts, sums, seqs = [0] * num_replicas, [0] * num_replicas, [0] * num_replicas
    payloads = []
    for _ in range(num_batches):
        replica = rng.randrange(num_replicas)
        blocks = [rng.randbytes(16) for _ in range(BLOCKS_PER_BATCH)]
        for block in blocks:
            sums[replica] ^= int.from_bytes(block[:8], "little")
        counts[replica] += len(blocks)
        seqs[replica] += 1
        batch = KvEventBatch(
            incarnation=Incarnation(replica_id=f"replica-{replica}", epoch=1),
            seq=seqs[replica],
            stored=[StoredBlocks(block_hashes=blocks)],
            index_count=counts[replica],
            index_xor=sums[replica],
        )
        payloads.append(batch.SerializeToString())
    return payloads


def blocks_per_second(num_replicas: int, num_batches: int) -> float:
    index = KvIndex()
    for number in range(num_replicas):
        index.publish(index.open(f"replica-{number}", 1), 0)
    payloads = batches(num_replicas, num_batches)
    started = time.thread_time()
    for payload in payloads:
        index.apply(KvEventBatch.FromString(payload))
    assert len(index) == num_batches * BLOCKS_PER_BATCH
    return num_batches * BLOCKS_PER_BATCH / (time.thread_time() - started)


def main(
    replicas: Annotated[list[int] | None, typer.Option(help="How many replicas (repeatable).")] = None,
    num_batches: Annotated[int, typer.Option("--batches", help="Messages of each measurement.")] = 5000,
) -> None:
    """Blocks a second that a gateway's index takes in."""
    for number in replicas or (100, 300, 1000):
        typer.echo(f"{number} replicas: {blocks_per_second(number, num_batches):,.0f} blocks/s of one core")


if __name__ == "__main__":
    typer.run(main)
