"""Replicas that consist of their cache events: each stores new blocks and, once full, drops its
oldest.

Knows the format of a batch of events; knows nothing about its readers.
"""

from __future__ import annotations

import os
from collections import deque

from headwater.proto.events_pb2 import Incarnation, KvEventBatch, StoredBlocks
from headwater.services.runtime.member import Kind, Member, ReplicaLoad
from headwater.services.runtime.served_model import ServedModel

EPOCH = 1
BLOCK_SIZE = 64
BLOCKS_PER_BATCH = 40
HASH_LEN = 16
MODEL = ServedModel(
    name="bench",
    revision="r",
    dtype="bfloat16",
    block_size=BLOCK_SIZE,
    kv_format="bfloat16",
    max_model_len=131_072,
    vocab_size=128_256,
)


class SyntheticPublisher:
    """One replica with a cache of `capacity` blocks."""

    def __init__(self, number: int, capacity: int) -> None:
        self.replica_id = f"replica-{number}"
        self._incarnation = Incarnation(replica_id=self.replica_id, epoch=EPOCH)
        self._capacity = capacity
        self._seq = 0
        self._xor = 0
        self._held: deque[bytes] = deque()

    @property
    def member(self) -> Member:
        load = ReplicaLoad(
            num_total_blocks=self._capacity,
            prefill_tps=12_000.0,
            itl_seconds=0.01,
            itl_seconds_per_request=0.0001,
        )
        return Member(
            kind=Kind.ENGINE,
            replica_id=self.replica_id,
            epoch=EPOCH,
            address=self.replica_id,
            model=MODEL,
            numerics_id="n",
            load=load,
        )

    def batch(self) -> bytes:
        """The next batch, as the bus carries it."""
        drawn = os.urandom(HASH_LEN * BLOCKS_PER_BATCH)
        stored = [drawn[start : start + HASH_LEN] for start in range(0, len(drawn), HASH_LEN)]
        self._held.extend(stored)
        removed = [self._held.popleft() for _ in range(len(self._held) - self._capacity)]
        for block in (*stored, *removed):
            self._xor ^= int.from_bytes(block[:8], "little")
        self._seq += 1
        return KvEventBatch(
            incarnation=self._incarnation,
            seq=self._seq,
            stored=[StoredBlocks(block_hashes=stored)],
            removed=removed,
            index_count=len(self._held),
            index_xor=self._xor,
        ).SerializeToString()


def publishers(num_replicas: int, num_blocks: int) -> list[SyntheticPublisher]:
    """Publishers whose caches hold `num_blocks` together."""
    return [
        SyntheticPublisher(number, num_blocks // num_replicas) for number in range(num_replicas)
    ]
