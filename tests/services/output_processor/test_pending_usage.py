"""Usage records of requests whose gateway died: exactly what was computed, once, whoever comes back
or does not."""

from __future__ import annotations

import asyncio
import datetime
import os
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import grpc
import msgspec
import pytest

from headwater.proto import output_processor_pb2_grpc
from headwater.proto.common_pb2 import Sampling
from headwater.proto.engine_pb2 import EngineFrame, Start
from headwater.proto.output_processor_pb2 import (
    Attach,
    Charge,
    FindStreamRequest,
    Keep,
    LetGo,
    Open,
)
from headwater.services.models.demo_model import DEMO_NAME
from headwater.services.output_processor import pending_usage, stream_log
from headwater.services.output_processor.__main__ import OutputProcessor
from headwater.services.output_processor.engines import EngineLinks
from headwater.services.output_processor.pending_usage import PendingUsage
from headwater.services.runtime.bus import Bus
from headwater.services.runtime.gateway_identity import Gateway
from headwater.services.runtime.listener import Listener
from headwater.services.runtime.usage_log import LEFT, UsageLog, UsageRecord
from headwater.services.text.tokenizer import Tokenizer
from tests.services.output_processor.scripted_engine import (
    ListeningGateway,
    ScriptedEngine,
    listening_gateway,
    scripted_engine,
)


@dataclass
class Line:
    """An output processor with a NATS, between a scripted engine and gateways that come and go."""

    address: str
    engine: ScriptedEngine
    usage: PendingUsage
    bus: Bus
    tenant: str

    def gateway(self, incarnation: str) -> Any:
        identity = Gateway("g", incarnation)
        return listening_gateway(self.address, self.engine, DEMO_NAME, identity.metadata)

    def charge(self, record_id: str, **more: Any) -> Charge:
        """Ids count over all tenants, so those of a test begin with its own."""
        return Charge(record_id=f"{self.tenant}/{record_id}", **more)

    async def open(
        self, gateway: ListeningGateway, *stream_ids: int, charge: Charge, **add: Any
    ) -> list[int]:
        """Returns the engine's numbers."""
        num_adds = len(self.engine.adds)
        is_resumable = add.pop("resumable", False)
        opening: Open = gateway.opening(
            *stream_ids,
            tenant=self.tenant,
            sampling=Sampling(n=len(stream_ids)),
            **{"attempt": 1} | add,
        )
        opening.charge.CopyFrom(charge)
        opening.resumable = is_resumable
        await gateway.send(
            opening, keeps=[Keep(stream_id=stream_ids[0], context=b"c")] if is_resumable else []
        )
        return list((await self.engine.add(num_adds)).stream_ids)

    async def until_let_go(self, num_readers: int) -> None:
        """Of the readers of the request `r` so many charge a part of it, none of whom is there."""
        asked = FindStreamRequest(request_id="r", tenant=self.tenant)
        async with asyncio.timeout(60), grpc.aio.insecure_channel(self.address) as channel:
            stub = output_processor_pb2_grpc.OutputProcessorStub(channel)
            while [each.num_readers async for each in stub.FindStream(asked)] != [num_readers]:  # noqa: ASYNC110 (another process would be asked the same)
                await asyncio.sleep(0.02)

    async def records(self) -> list[UsageRecord]:
        since = datetime.datetime.now(datetime.UTC) - datetime.timedelta(hours=1)
        records = [record async for _, record in UsageLog(self.bus).read(self.tenant, since)]
        return [
            msgspec.structs.replace(each, request_id=each.request_id.partition("/")[2])
            for each in records
        ]

    async def until_recorded(
        self, condition: Callable[[list[UsageRecord]], bool]
    ) -> dict[str, UsageRecord]:
        """By id; each has one."""
        async with asyncio.timeout(60):
            while not condition(records := await self.records()):  # noqa: ASYNC110 (as above)
                await asyncio.sleep(0.05)
        assert len({record.request_id for record in records}) == len(records)
        return {record.request_id: record for record in records}


@pytest.fixture
async def line(
    demo_tokenizer: Tokenizer, nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Line]:
    monkeypatch.setattr(pending_usage, "RETURN_SECONDS", 0.3)
    async with (
        scripted_engine() as engine,
        EngineLinks() as links,
        Bus.open(nats_url, wait_seconds=60.0) as bus,
        PendingUsage(bus).running() as usage,
    ):
        servicer = OutputProcessor({DEMO_NAME: demo_tokenizer}, links, usage=usage)
        listener = Listener("127.0.0.1", 0)
        output_processor_pb2_grpc.add_OutputProcessorServicer_to_server(servicer, listener.server)
        await listener.start()
        yield Line(listener.address, engine, usage, bus, f"t-{os.urandom(4).hex()}")
        await listener.server.stop(grace=0)


def counts(record: UsageRecord) -> tuple[int, int, int, int]:
    return record.prompts, record.prompt_tokens, record.cached_tokens, record.output_tokens


async def received(gateway: ListeningGateway, tokens: dict[int, int]) -> None:
    """So many of each stream."""
    while any(
        len(gateway.received[each].token_ids) < n if each in gateway.received else True
        for each, n in tokens.items()
    ):
        await gateway.read()


async def test_what_a_dead_gateway_carried_is_recorded_once_to_the_token(line: Line) -> None:
    async with line.gateway("first") as gateway:
        two = await line.open(gateway, 1, 2, charge=line.charge("two", key_id="k", prompt_tokens=2))
        line.engine.send(EngineFrame(starts=[Start(stream_id=two[0], cached_tokens=1)]))
        line.engine.send_tokens({two[0]: [5, 6, 7], two[1]: [5]})
        line.engine.send_finish(two[1])
        # Several prompts are one record; of one that was tried before, what was told then counts.
        many = [
            await line.open(
                gateway,
                3 + i,
                prompt_index=i,
                request_id="many",
                charge=line.charge("many", prompt_tokens=2),
            )
            for i in range(2)
        ]
        line.engine.send_tokens({many[0][0]: [5], many[1][0]: [5, 6]})
        await received(gateway, {1: 3, 2: 1, 3: 1, 4: 2})
        again = line.charge("many", prompt_tokens=2, cached_tokens=1, output_tokens=4)
        await line.open(gateway, 5, prompt_index=1, request_id="many", attempt=2, charge=again)
        await line.open(
            gateway, 6, charge=line.charge("scores", prompt_tokens=2, prompt_alone=True)
        )
        done = await line.open(gateway, 7, charge=line.charge("done", prompt_tokens=2))
        await line.open(gateway, 8, charge=line.charge("recorded", prompt_tokens=2))
        line.engine.send_tokens({done[0]: [5, 6]})
        line.engine.send_finish(done[0])
        await gateway.finish(7)
        await gateway.send(recorded=[f"{line.tenant}/recorded", "unknown"])
        await line.open(gateway, 9, charge=line.charge("last", prompt_tokens=2))
    async with line.gateway("second") as other:
        # What the other one carries is none of it.
        await line.open(other, 1, charge=line.charge("another", prompt_tokens=2))
        records = await line.until_recorded(lambda records: len(records) == 5)
        assert {name: counts(record) for name, record in records.items()} == {
            "two": (1, 2, 1, 4),
            "many": (2, 4, 1, 5),
            "scores": (1, 2, 0, 0),
            "done": (1, 2, 0, 2),
            "last": (1, 2, 0, 0),
        }
        two_record = records["two"]
        assert (two_record.key_id, two_record.model, two_record.gateway) == ("k", DEMO_NAME, "g")
        assert two_record.outcome == LEFT
        numbers = {*two, *many[0]}
        await line.engine.receives(lambda: numbers - {two[1]} <= set(line.engine.cancels))


async def test_a_gateway_that_comes_back_writes_its_own_and_one_taken_for_dead_has_the_last_word(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pending_usage, "RETURN_SECONDS", 60.0)
    async with line.gateway("same") as gateway:
        [number] = await line.open(gateway, 1, charge=line.charge("r", prompt_tokens=2))
        line.engine.send_tokens({number: [5, 6, 7]})
        await received(gateway, {1: 3})
    async with line.gateway("same") as gateway:
        await line.open(gateway, 1, charge=line.charge("n", prompt_tokens=2))
        monkeypatch.setattr(pending_usage, "RETURN_SECONDS", 0.3)
        async with line.gateway("other") as other:
            await line.open(other, 1, charge=line.charge("o", prompt_tokens=2))
        await line.until_recorded(lambda records: [each.request_id for each in records] == ["o"])
    await line.until_recorded(
        lambda records: [each.request_id for each in records] == ["o", "r", "n"]
    )
    # It went on elsewhere, to ten tokens.
    log = UsageLog(line.bus)
    async with log.running():
        whole = UsageRecord(
            request_id=f"{line.tenant}/r",
            tenant=line.tenant,
            model="m",
            at=1.0,
            prompt_tokens=2,
            output_tokens=10,
            gateway="g",
        )
        for _ in range(2):
            await log.stored(whole, lambda seq: None)
        records = await line.until_recorded(lambda records: len(records) == 4)
    assert counts(records["r"]) == (1, 2, 0, 3)
    assert counts(records["r+"]) == (0, 0, 0, 7)


async def test_a_resumable_request_is_recorded_by_its_next_reader_or_when_its_time_is_over(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = {"request_id": "r", "resumable": True}
    async with line.gateway("first") as first:
        [number] = await line.open(first, 1, charge=line.charge("r", prompt_tokens=2), **ids)
        line.engine.send_tokens({number: [5, 6, 7]})
        await received(first, {1: 3})
    await line.until_let_go(0)
    async with line.gateway("second") as second:
        await second.send(
            attaches=[
                Attach(
                    request_id="r", tenant=line.tenant, stream_ids=[4], record_id=f"{line.tenant}/r"
                )
            ]
        )
        await received(second, {4: 3})
        await second.send(let_go=[LetGo(stream_ids=[4], prompt_tokens=2, output_tokens=3)])
        await line.until_let_go(1)
        async with line.gateway("third") as third:
            await third.send(
                attaches=[
                    Attach(
                        request_id="r",
                        tenant=line.tenant,
                        stream_ids=[1],
                        record_id=f"{line.tenant}/r.1",
                    )
                ]
            )
            line.engine.send_tokens({number: [8, 9]}, first=3)
            await received(third, {1: 5})
            monkeypatch.setattr(stream_log, "HOLD_SECONDS", 0.1)
        # Nobody comes. The second one has not said yet that its record is stored; it dies now.
        await line.until_recorded(lambda records: [each.request_id for each in records] == ["r.1"])
    records = await line.until_recorded(lambda records: len(records) == 2)
    assert counts(records["r"]) == (1, 2, 0, 3)
    assert counts(records["r.1"]) == (0, 0, 0, 2)


async def test_more_pending_records_than_there_is_room_for_are_left_to_their_gateways(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pending_usage, "MAX_RECORDS", 2)
    async with line.gateway("first") as first:
        for i in range(4):
            await line.open(first, i + 1, charge=line.charge(f"r{i}", prompt_tokens=2))
    await line.until_recorded(
        lambda records: sorted(each.request_id for each in records) == ["r2", "r3"]
    )
