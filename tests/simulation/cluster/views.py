"""Reads a cluster from outside: stages' metrics, engines' reports, the index in Redis. Changes
nothing."""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import AsyncIterator
from dataclasses import dataclass

import grpc
import httpx
from prometheus_client.parser import text_string_to_metric_families

from headwater.proto import engine_pb2, engine_pb2_grpc
from headwater.services.index.slots import SlotTable, own_key
from headwater.services.runtime.channel import open_channel
from headwater.services.runtime.member import Member, ReplicaLoad
from headwater.services.runtime.served_model import ServedModel
from headwater.services.runtime.store import Store, StoreUnavailable
from tests.simulation.cluster.processes import (
    ENGINE,
    GATEWAY,
    OUTPUT_PROCESSOR,
    PROCESSOR,
    REDIS,
    Cluster,
)

ASK_SECONDS = 2.0
Series = dict[str, dict[str, float]]
"""Values by metric name and replica (empty where it has no such label), added up."""
BUSY = ("headwater_num_requests_running", "headwater_num_requests_waiting", "headwater_num_streams")
"""Metrics of a gateway that are zero without requests."""


class NotReached(Exception):
    """A process does not answer now."""


@dataclass(frozen=True, slots=True)
class EngineView:
    """An engine by its own report."""

    replica_id: str
    epoch: int
    model: ServedModel
    load: ReplicaLoad
    seq: int
    """Number of its last batch of events."""
    blocks: frozenset[bytes]


class Views:
    """Views of one cluster. Use within `open`."""

    def __init__(self, cluster: Cluster, client: httpx.AsyncClient) -> None:
        self._cluster = cluster
        self._client = client

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls, cluster: Cluster) -> AsyncIterator[Views]:
        async with httpx.AsyncClient(timeout=ASK_SECONDS) as client:
            yield cls(cluster, client)

    async def metrics(self, name: str) -> Series:
        """Metrics of a stage. Raises `NotReached`."""
        try:
            reply = await self._client.get(
                f"http://{self._cluster.address(name, 'metrics')}/metrics"
            )
        except httpx.HTTPError as failure:
            raise NotReached(f"{name} does not answer: {failure!r}") from None
        found: Series = defaultdict(lambda: defaultdict(float))
        for family in text_string_to_metric_families(reply.text):
            for sample in family.samples:
                found[sample.name][sample.labels.get("replica", "")] += sample.value
        return found

    async def engine(self, name: str) -> EngineView:
        """Report of an engine. Raises `NotReached`."""
        try:
            async with (
                asyncio.timeout(ASK_SECONDS),
                open_channel(self._cluster.address(name)) as channel,
            ):
                engine = engine_pb2_grpc.EngineStub(channel)
                member = Member.from_pb(await engine.Info(engine_pb2.InfoRequest()))
                parts = [part async for part in engine.KvSnapshot(engine_pb2.KvSnapshotRequest())]
        except (grpc.aio.AioRpcError, TimeoutError) as failure:
            raise NotReached(f"{name} does not answer: {type(failure).__name__}") from None
        assert member.model is not None
        assert member.load is not None
        blocks = frozenset(block for part in parts for block in part.block_hashes)
        return EngineView(
            member.replica_id, member.epoch, member.model, member.load, parts[-1].seq, blocks
        )

    async def all_answer(self) -> bool:
        """Whether the last life of every stage answers."""
        kinds = (ENGINE, PROCESSOR, OUTPUT_PROCESSOR, GATEWAY)
        try:
            await asyncio.gather(
                *(self.metrics(name) for kind in kinds for name in self._cluster.names(kind))
            )
        except NotReached:
            return False
        return self._cluster.is_whole

    async def is_known(self, name: str) -> bool:
        """Whether every gateway follows this life of an engine, and Redis has its column. Raises
        `NotReached`."""
        before = await self.engine(name)
        gateways = await asyncio.gather(
            *(self.metrics(each) for each in self._cluster.names(GATEWAY))
        )
        after, columns = await self.engine(name), await self.columns(before.model)
        # The life before had come further.
        return (before.replica_id, before.epoch) in columns and all(
            seen["headwater_index_synced"].get(before.replica_id)
            and before.seq <= seen["headwater_index_batch"][before.replica_id] <= after.seq
            for seen in gateways
        )

    async def engines(self) -> list[EngineView]:
        return await asyncio.gather(*(self.engine(name) for name in self._cluster.names(ENGINE)))

    async def columns(self, model: ServedModel) -> dict[tuple[str, int], frozenset[bytes]]:
        """The published columns of the index in Redis, by incarnation. Raises `NotReached`."""
        found: dict[tuple[str, int], frozenset[bytes]] = {}
        try:
            async with Store.open(self._cluster.servers[REDIS].url) as store:
                for shard in range(model.num_shards):
                    for slot in await SlotTable(store, model.key, shard).read():
                        if slot.is_live:
                            own = await store.command(
                                "SMEMBERS", own_key(model.key, shard, slot.number)
                            )
                            known = found.get((slot.replica_id, slot.epoch), frozenset())
                            found[slot.replica_id, slot.epoch] = known | frozenset(own)
        except StoreUnavailable as failure:
            raise NotReached(f"redis does not answer: {failure}") from None
        return found

    async def shared_times(self) -> dict[str, float]:
        """Virtual time of each tenant in Redis. Raises `NotReached`."""
        try:
            async with Store.open(self._cluster.servers[REDIS].url) as store:
                flat = await store.command("HGETALL", "fair:{tenants}")
        except StoreUnavailable as failure:
            raise NotReached(f"redis does not answer: {failure}") from None
        pairs = flat.items() if isinstance(flat, dict) else zip(flat[::2], flat[1::2], strict=True)
        return {name.decode(): float(value) for name, value in pairs}

    async def disagreements(self) -> list[str]:
        """Disagreements without requests and faults; empty: all processes agree and nothing is
        held."""
        try:
            engines = await self.engines()
            gateways = {name: await self.metrics(name) for name in self._cluster.names(GATEWAY)}
            outputs = {
                name: await self.metrics(name) for name in self._cluster.names(OUTPUT_PROCESSOR)
            }
            columns = await self.columns(engines[0].model)
        except NotReached as failure:
            return [str(failure)]
        found = [
            f"{name} has {n:.0f} streams" for name, seen in outputs.items() if (n := _streams(seen))
        ]
        found += [wrong for each in engines for wrong in _held_by(each)]
        found += [
            wrong for name, seen in gateways.items() for wrong in _known_to(name, seen, engines)
        ]
        return found + _written_in(columns, engines)


def _streams(seen: Series) -> float:
    return seen["headwater_output_streams"][""]


def _held_by(engine: EngineView) -> list[str]:
    load = engine.load
    held = (load.num_running, load.num_waiting, load.num_used_blocks)
    return [f"{engine.replica_id} holds {held} running, waiting, blocks"] if any(held) else []


def _known_to(name: str, seen: Series, engines: list[EngineView]) -> list[str]:
    """Disagreements of a gateway."""
    found = [f"{name} has {metric} {n:.0f}" for metric in BUSY if (n := seen[metric][""])]
    if set(seen["headwater_index_blocks"]) != {each.replica_id for each in engines}:
        found.append(f"{name} knows the caches of {sorted(seen['headwater_index_blocks'])}")
    for each in engines:
        metrics = ("headwater_index_blocks", "headwater_index_batch", "headwater_index_synced")
        known = tuple(seen[metric][each.replica_id] for metric in metrics)
        true = (len(each.blocks), each.seq, 1)
        if known != true:
            found.append(
                f"{name} knows {known} of {each.replica_id}, which is {true}: blocks, batch, synced"
            )
    return found


def _written_in(
    columns: dict[tuple[str, int], frozenset[bytes]], engines: list[EngineView]
) -> list[str]:
    true = {(each.replica_id, each.epoch): each.blocks for each in engines}
    if columns.keys() != true.keys():
        return [f"redis has columns of {sorted(columns)} instead of {sorted(true)}"]
    return [
        f"redis has other blocks of {key}" for key, blocks in columns.items() if blocks != true[key]
    ]
