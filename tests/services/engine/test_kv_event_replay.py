"""What an engine's replayed KV events add up to."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from headwater.engine_core.kv.prefix_hash import block_hashes
from headwater.proto import engine_pb2 as pb
from headwater.proto.events_pb2 import KvEventBatch
from headwater.services.engine.stage.kv_events import checksum_of
from tests.services.engine.engine_process import (
    add,
    client_of,
    engine_process,
    prompt,
)


async def kv_state(client: Any, epoch: int) -> tuple[set[bytes], list[KvEventBatch]]:
    """What replayed events add up to, and the events."""
    cached: set[bytes] = set()
    batches = [
        batch async for batch in client.stub.KvEvents(pb.KvEventsRequest(epoch=epoch, after_seq=0))
    ]
    for batch in batches:
        cached = set() if batch.cleared else cached - set(batch.removed)
        cached |= {block for chain in batch.stored for block in chain.block_hashes}
        checksum = 0
        for block in cached:
            checksum ^= checksum_of(block)
        assert (batch.index_count, batch.index_xor) == (len(cached), checksum)
    return cached, batches


async def test_events_replayed_and_the_snapshot_are_what_is_cached() -> None:
    with engine_process("--num-blocks=300") as engine:
        async with client_of(engine) as client:
            epoch = (await client.stub.Info(pb.InfoRequest())).incarnation.epoch
            # Twice as many blocks as there are: the first prompts are evicted.
            for i in range(60):
                await client.send(add(i, prompt(i, 160), 2))
                await client.read_until_finished(i)
            cached, batches = await kv_state(client, epoch)
            parts = [part async for part in client.stub.KvSnapshot(pb.KvSnapshotRequest())]
            assert {block for part in parts for block in part.block_hashes} == cached
            assert [batch.seq for batch in batches] == list(range(1, parts[-1].seq + 1))
            assert (parts[-1].last, parts[-1].incarnation.epoch) == (True, epoch)
            assert cached >= set(block_hashes(bytes(16), prompt(59, 160), 16))
            assert not cached & set(block_hashes(bytes(16), prompt(0, 160), 16))
            for after_seq, wrong_epoch in ((parts[-1].seq + 1, 0), (0, 1)):
                with pytest.raises(grpc.aio.AioRpcError, match="OUT_OF_RANGE"):
                    async for _ in client.stub.KvEvents(
                        pb.KvEventsRequest(epoch=epoch ^ wrong_epoch, after_seq=after_seq)
                    ):
                        pass
