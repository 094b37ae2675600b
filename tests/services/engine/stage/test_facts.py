"""An engine among NATS and Redis: what it says there, and what it does without them."""

from __future__ import annotations

import asyncio
import uuid
from pathlib import Path

from headwater.engine_core.kv.prefix_hash import block_hashes
from headwater.proto.engine_pb2 import Credit
from headwater.proto.events_pb2 import KvEventBatch, Load
from headwater.services.index.slots import SlotTable, block_prefix
from headwater.services.models.entry import register
from headwater.services.runtime import subjects
from headwater.services.runtime.bus import Bus
from headwater.services.runtime.member import Kind
from headwater.services.runtime.membership import Members
from headwater.services.runtime.served_model import ServedModel
from headwater.services.runtime.store import Store
from headwater.services.stack.embedded import start_nats, start_valkey
from tests.services.engine.engine_process import (
    EngineProcess,
    add,
    answer,
    client_of,
    engine_process,
    prompt,
)


def served(name: str, dtype: str = "simulated") -> ServedModel:
    return ServedModel(
        name=name,
        revision="simulated",
        dtype=dtype,
        block_size=16,
        kv_format="simulated",
        max_model_len=4096,
        vocab_size=49152,
    )


async def test_an_engine_joins_publishes_its_cache_and_leaves_before_it_drains(
    nats_url: str, redis_url: str
) -> None:
    model = served(f"test/{uuid.uuid4().hex}")
    flags = (
        f"--nats-url={nats_url}",
        f"--redis-url={redis_url}",
        f"--served-model-name={model.name}",
    )
    async with (
        Bus.open(nats_url) as bus,
        Store.open(redis_url) as store,
        Members(bus, [Kind.ENGINE]).running() as members,
        bus.subscribe(f"kv.{model.key}.>") as batches,
        bus.subscribe(f"load.{model.key}.>") as loads,
    ):
        engine = await asyncio.to_thread(EngineProcess, *flags, "--replica-id=r7")
        async with asyncio.timeout(60), client_of(engine) as client:
            await members.wait_for(lambda members: bool(members.of(Kind.ENGINE, model.key)))
            [member] = members.of(Kind.ENGINE, model.key)
            assert (member.replica_id, member.address, member.model) == (
                "r7",
                engine.address,
                model,
            )

            await client.send(add(1, prompt(1, 64), 2), add(2, prompt(2), 1000, credit=3))
            await client.read_until_finished(1)
            message = await anext(batches)
            batch = KvEventBatch.FromString(message.payload)
            assert message.subject == subjects.kv_events(model.key, "r7")
            stored = [block for chain in batch.stored for block in chain.block_hashes]
            assert (batch.incarnation.epoch, batch.seq) == (member.epoch, 1)
            assert stored[:4] == block_hashes(bytes(16), prompt(1, 64), 16)
            async for message in loads:
                if Load.FromString(message.payload).num_running == 1:
                    break

            table = SlotTable(store, model.key, 0)
            # The index is written independently of the engine's messages on the bus.
            while not [slot for slot in await table.read() if slot.is_live]:  # noqa: ASYNC110 (Redis has no event for it)
                await asyncio.sleep(0.01)
            [slot] = await table.read()
            assert (slot.replica_id, slot.epoch, slot.address) == (
                "r7",
                member.epoch,
                engine.address,
            )
            while not await store.command(  # noqa: ASYNC110
                "GETBIT", block_prefix(model.key, 0) + stored[3], slot.number
            ):
                await asyncio.sleep(0.01)

            engine.terminate()
            await members.wait_for(lambda members: not members.of(Kind.ENGINE, model.key))
            await client.load_that(lambda load: load.draining)
            while [slot for slot in await table.read() if slot.is_live]:  # noqa: ASYNC110 (Redis has no event for it)
                await asyncio.sleep(0.01)
            assert 2 not in client.finishes
            await client.send(credits=[Credit(stream_id=2, tokens=1000)])
            await client.read_until_finished(2)
        assert await asyncio.to_thread(engine.wait) == 0
        engine.close()


async def test_an_engine_that_serves_the_model_differently_is_refused_by_field(
    redis_url: str,
) -> None:
    model = served(f"test/{uuid.uuid4().hex}", dtype="float32")
    async with Store.open(redis_url) as store:
        await register(store, model)
    engine = await asyncio.to_thread(
        EngineProcess, f"--redis-url={redis_url}", f"--served-model-name={model.name}"
    )
    assert await asyncio.to_thread(engine.wait) == 1
    assert (
        f"dtype is 'simulated'; the model '{model.name}' is served with 'float32'" in engine.close()
    )


async def test_streams_go_on_when_nats_and_redis_are_lost(free_dir: Path) -> None:
    nats, redis = await start_nats(free_dir), await start_valkey(free_dir)
    with engine_process(f"--nats-url={nats.url}", f"--redis-url={redis.url}") as engine:
        async with client_of(engine) as client:
            await client.send(add(1, prompt(1), 100, credit=10))
            await client.read_tokens(1, 10)
            await nats.stop()
            await redis.stop()
            await client.send(add(2, prompt(2), 100))
            await client.send(credits=[Credit(stream_id=1, tokens=100)])
            await client.read_until_finished(1, 2)
            assert client.tokens == {1: answer(prompt(1), 100), 2: answer(prompt(2), 100)}
        engine.terminate()
        assert await asyncio.to_thread(engine.wait) == 0
