"""Requests that can be resumed: held for the next reader, told again from the start, bounded in
time and in memory."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import grpc
import pytest

from headwater.proto import common_pb2, output_processor_pb2_grpc
from headwater.proto.engine_pb2 import AddPart, Cancel, Credit, EngineFrame, LogprobColumns, Start
from headwater.proto.output_processor_pb2 import (
    Attach,
    FindStreamRequest,
    FoundStream,
    GatewayFrame,
    Keep,
    LetGo,
    OutputFinish,
)
from headwater.services.models.demo_model import DEMO_NAME
from headwater.services.output_processor import stream_log
from headwater.services.output_processor.__main__ import OutputProcessor
from headwater.services.output_processor.engines import EngineLinks
from headwater.services.output_processor.session import GatewaySession
from headwater.services.output_processor.stream_log import StreamLog
from headwater.services.output_processor.stream_logs import StreamLogs
from headwater.services.runtime.listener import Listener
from headwater.services.text.tokenizer import Tokenizer
from tests.services.output_processor.scripted_engine import (
    ListeningGateway,
    ScriptedEngine,
    listening_gateway,
    scripted_engine,
)


@dataclass
class Line:
    """An output processor between a scripted engine and gateways that come and go."""

    address: str
    engine: ScriptedEngine
    stub: Any
    tokenizer: Tokenizer

    def gateway(self) -> Any:
        return listening_gateway(self.address, self.engine, DEMO_NAME)

    async def open(self, gateway: ListeningGateway, *stream_ids: int, **add: Any) -> list[int]:
        """A request for choices that can be resumed; returns the engine's numbers."""
        num_adds = len(self.engine.adds)
        sampling = common_pb2.Sampling(n=len(stream_ids), logprobs=True)
        opening = gateway.opening(
            *stream_ids, request_id="r1", tenant="acme", sampling=sampling, **add
        )
        opening.resumable = True
        await gateway.send(opening, keeps=[Keep(stream_id=stream_ids[0], context=b"context")])
        return list((await self.engine.add(num_adds)).stream_ids)

    async def find(self, request_id: str = "r1", tenant: str = "acme") -> FoundStream | None:
        """None: there is none."""
        call = self.stub.FindStream(FindStreamRequest(request_id=request_id, tenant=tenant))
        with contextlib.suppress(grpc.aio.AioRpcError):
            async for found in call:
                return found  # type: ignore[no-any-return]
        assert await call.code() is grpc.StatusCode.NOT_FOUND
        return None

    async def until_found(
        self, condition: Callable[[FoundStream | None], bool]
    ) -> FoundStream | None:
        async with asyncio.timeout(60):
            while not condition(found := await self.find()):  # noqa: ASYNC110 (another process would be asked the same)
                await asyncio.sleep(0.02)
        return found


@pytest.fixture
async def line(demo_tokenizer: Tokenizer) -> AsyncIterator[Line]:
    async with scripted_engine() as engine, EngineLinks() as links:
        servicer = OutputProcessor({DEMO_NAME: demo_tokenizer}, links)
        listener = Listener("127.0.0.1", 0)
        output_processor_pb2_grpc.add_OutputProcessorServicer_to_server(servicer, listener.server)
        await listener.start()
        async with grpc.aio.insecure_channel(listener.address) as channel:
            stub = output_processor_pb2_grpc.OutputProcessorStub(channel)
            yield Line(listener.address, engine, stub, demo_tokenizer)
        await listener.server.stop(grace=0)


async def attach(gateway: ListeningGateway, *stream_ids: int) -> None:
    await gateway.call.write(
        GatewayFrame(attaches=[Attach(request_id="r1", tenant="acme", stream_ids=stream_ids)])
    )


async def until(gateway: ListeningGateway, texts: dict[int, str]) -> None:
    while {
        each: gateway.received[each].text for each in texts if each in gateway.received
    } != texts:
        await gateway.read()


async def test_a_request_outlives_its_reader_and_is_replayed_from_its_start(line: Line) -> None:
    word = line.tokenizer.encode(" hello", add_special_tokens=False)[0]
    async with line.gateway() as first:
        numbers = await line.open(first, 1, 2, credit=100)
        line.engine.send(EngineFrame(starts=[Start(stream_id=numbers[0], cached_tokens=16)]))
        scores = LogprobColumns(token_indices=[0], logprobs=[-0.5], num_top=[0])
        line.engine.send_tokens({numbers[0]: [word], numbers[1]: [word, word]}, logprobs=scores)
        await until(first, {1: " hello", 2: " hello hello"})
    line.engine.send_tokens({numbers[0]: [word]}, first=1)
    line.engine.send_finish(numbers[1])
    async with line.gateway() as second:
        await attach(second, 7, 8)
        await second.finish(8)
        await until(second, {7: " hello hello", 8: " hello hello"})
        [attached] = [each for frame in second.frames for each in frame.attached]
        assert (list(attached.stream_ids), list(attached.granted)) == ([7, 8], [100, 100])
        [start] = [start for frame in second.frames for start in frame.starts]
        assert (start.stream_id, start.cached_tokens) == (7, 16)
        scored = [
            token for frame in second.frames for row in frame.logprobs for token in row.tokens
        ]
        assert [token.chosen.logprob for token in scored] == [-0.5]
        await second.send(credits=[Credit(stream_id=7, tokens=50)])
        await line.engine.receives(
            lambda: (
                [(each.stream_id, each.tokens) for each in line.engine.credits]
                == [(numbers[0], 50)]
            )
        )
        line.engine.send_finish(numbers[0])
        assert (await second.finish(7)).ended_at
    async with line.gateway() as third:
        await attach(third, 1, 2)
        await third.finish(1)
        assert {each: third.received[each].text for each in (1, 2)} == {
            1: " hello hello",
            2: " hello hello",
        }
    assert not line.engine.cancels


async def test_a_reader_may_number_the_choices_as_another_numbered_others_of_them(
    line: Line,
) -> None:
    word = line.tokenizer.encode(" hello", add_special_tokens=False)[0]
    async with line.gateway() as first:
        numbers = await line.open(first, 5, 6)
        line.engine.send_tokens({numbers[0]: [word]})
        await until(first, {5: " hello"})
    async with line.gateway() as second:
        await attach(second, 6, 7)
        await until(second, {6: " hello"})
        line.engine.send_tokens({numbers[0]: [word]}, first=1)
        line.engine.send_tokens({numbers[1]: [word]})
        await until(second, {6: " hello hello", 7: " hello"})
    assert not line.engine.cancels


async def test_what_is_begun_anew_ends_no_stream_that_has_its_old_number_and_stays_resumable(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_log, "KEEP_SECONDS", 0.05)
    word = line.tokenizer.encode(" hello", add_special_tokens=False)[0]
    async with line.gateway() as first:
        [old] = await line.open(first, 1, attempt=1)
    async with line.gateway() as second:
        await second.send(second.opening(1, request_id="r2", tenant="acme"))
        other = (await line.engine.add(1)).stream_ids[0]
        [number] = await line.open(second, 2, attempt=2)
        await line.engine.receives(lambda: line.engine.cancels == {old: "superseded"})
        line.engine.send_tokens({other: [word], number: [word]})
        await until(second, {1: " hello", 2: " hello"})
        assert second.received[1].finish is None
        # Longer than what has ended is kept.
        await asyncio.sleep(0.2)
        assert await line.find() is not None


async def test_a_second_reader_replaces_the_first_which_is_charged_what_it_was_sent(
    line: Line,
) -> None:
    async with line.gateway() as first, line.gateway() as second:
        [number] = await line.open(first, 1)
        line.engine.send_tokens(
            {number: line.tokenizer.encode(" one two", add_special_tokens=False)}
        )
        await until(first, {1: " one two"})
        await attach(second, 5)
        gone = await first.finish(1)
        assert (gone.cause, gone.retriable) == (common_pb2.LOSS_CAUSE_TAKEN_OVER, False)
        line.engine.send_finish(number)
        await second.finish(5)
        assert second.received[5].text == " one two"
        [attached] = [each for frame in second.frames for each in frame.attached]
        assert (attached.prompt_tokens, attached.output_tokens) == (2, 2)
    assert not line.engine.cancels


async def test_a_reader_that_leaves_reports_what_is_charged_and_only_its_tenant_finds_the_stream(
    line: Line,
) -> None:
    async with line.gateway() as first:
        [number] = await line.open(first, 1)
        line.engine.send_tokens(
            {number: line.tokenizer.encode(" one two", add_special_tokens=False)}
        )
        await until(first, {1: " one two"})
        await first.send(let_go=[LetGo(stream_ids=[1], prompt_tokens=2, output_tokens=1)])
        found = await line.until_found(lambda found: found is not None and found.output_tokens == 1)
        assert found is not None
        assert (found.context, found.num_choices, found.prompt_tokens) == (b"context", 1, 2)
        assert (list(found.num_tokens), found.ended, found.num_readers) == ([2], False, 1)
        assert await line.find(tenant="other") is None
        assert await line.find(request_id="r2") is None
        # Taken over by another reader of the same session.
        await attach(first, 2)
        await until(first, {2: " one two"})
        await first.send(cancels=[Cancel(stream_id=2)])
        await line.engine.receives(lambda: line.engine.cancels == {number: "cancelled"})
        await line.until_found(lambda found: found is None)


async def test_a_stream_without_a_reader_in_time_ends_and_is_forgotten(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_log, "HOLD_SECONDS", 0.2)
    async with line.gateway() as first:
        [number] = await line.open(first, 1)
        line.engine.send_tokens({number: [5]})
        await first.read()
    await line.engine.receives(lambda: line.engine.cancels == {number: "nobody_came"})
    assert await line.find() is None
    async with line.gateway() as second:
        [number] = await line.open(second, 1)
        line.engine.send_finish(number)
        await second.finish(1)
        assert await line.find() is not None
        monkeypatch.setattr(stream_log, "KEEP_SECONDS", 0.1)
        [number] = await line.open(second, 2, attempt=2)
        line.engine.send_finish(number)
        await second.finish(2)
        await line.until_found(lambda found: found is None)
        await attach(second, 3)
        assert (await second.finish(3)).error == "the stream is no longer kept"


async def test_a_request_past_its_bound_goes_on_for_its_reader_alone(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_log, "MAX_TOKENS", 4)
    async with line.gateway() as first:
        [number] = await line.open(first, 1)
        for i in range(6):
            line.engine.send_tokens(
                {number: line.tokenizer.encode(" a", add_special_tokens=False)}, first=i
            )
        await until(first, {1: " a" * 6})
        assert await line.find() is None
    await line.engine.receives(lambda: line.engine.cancels == {number: "gateway_gone"})


async def test_the_oldest_that_has_ended_makes_room_or_else_the_oldest(line: Line) -> None:
    logs = StreamLogs(max_bytes=1700)
    async with line.gateway() as gateway:
        session = GatewaySession({}, EngineLinks(), logs=logs)
        kept = {}
        for number, name in enumerate(("running", "ended", "young"), 1):
            opening = gateway.opening(
                number, request_id=name, tenant="acme", sampling=common_pb2.Sampling(n=1)
            )
            kept[name] = logs.begin(session, opening, b"")
        for name, log in kept.items():
            assert log is not None
            log.add_row(0, 0, [5], "x", 0, 1)
            if name == "ended":
                log.add_finish(OutputFinish(stream_id=0))
        assert [name for name in kept if logs.find(name, "acme")] == ["running", "ended", "young"]
        assert kept["young"] is not None
        kept["young"].add_row(0, 1, [5], "x" * 500, 1, 500)
        assert [name for name in kept if logs.find(name, "acme")] == ["running", "young"]
        kept["young"].add_row(0, 2, [5], "x" * 200, 501, 200)
        assert [name for name in kept if logs.find(name, "acme")] == ["young"]


async def test_a_tenant_makes_room_for_itself_by_its_own_logs(line: Line) -> None:
    logs = StreamLogs(max_bytes=3000)
    async with line.gateway() as gateway:
        session = GatewaySession({}, EngineLinks(), logs=logs)
        kept = {}
        for number, (name, tenant) in enumerate(
            (("oldest", "bolt"), ("old", "acme"), ("young", "acme")), 1
        ):
            opening = gateway.opening(
                number, request_id=name, tenant=tenant, sampling=common_pb2.Sampling(n=1)
            )
            kept[name] = log = logs.begin(session, opening, b"x" * 1000)
            assert log is not None
            if tenant == "bolt":
                log.add_finish(OutputFinish(stream_id=0))
        assert [
            name for name, log in kept.items() if log is not None and logs.find(name, log.tenant)
        ] == [
            "oldest",
            "young",
        ]


async def test_a_number_leaves_the_request_that_has_it_now(line: Line) -> None:
    logs = StreamLogs()
    two = common_pb2.Sampling(n=2)
    async with line.gateway() as gateway, EngineLinks() as links:
        session = GatewaySession({DEMO_NAME: line.tokenizer}, links, logs=logs)

        def begun(*stream_ids: int, request_id: str, **add: Any) -> StreamLog:
            opening = gateway.opening(
                *stream_ids, request_id=request_id, tenant="acme", sampling=two, **add
            )
            opening.resumable = True
            session.take(GatewayFrame(opens=[opening]))
            log = logs.find(request_id, "acme")
            assert log is not None
            return log

        first = begun(1, 2, request_id="r1")
        # Its second choice goes on under another number, and the old one is given to another
        # request.
        assert (
            begun(3, request_id="r1", choice_indices=[1], output_ids=[5], num_output_tokens=1)
            is first
        )
        second = begun(2, 4, request_id="r2")
        readers = []
        for stream_ids in ([2, 4], [2], [3]):
            session.take(GatewayFrame(let_go=[LetGo(stream_ids=stream_ids)]))
            readers.append((first.reader, second.reader))
        assert readers == [(session, None), (session, None), (None, None)]


async def test_an_attempt_on_another_engine_goes_on_in_the_log(line: Line) -> None:
    ids = line.tokenizer.encode(" one two three", add_special_tokens=False)
    async with line.gateway() as first:
        [number] = await line.open(first, 1, attempt=1)
        line.engine.send_tokens({number: ids[:1]})
        line.engine.send_tokens({number: ids[1:2]}, first=1)
        line.engine.send_finish(
            number, common_pb2.FINISH_REASON_ERROR, retriable=True, error="gone"
        )
        assert (await first.finish(1)).error == "gone"
        # The last row did not reach the gateway.
        [number] = await line.open(
            first, 2, attempt=2, output_ids=ids[:1], num_output_tokens=1, delivered=[4]
        )
        line.engine.send_tokens({number: ids[1:]}, first=1)
        line.engine.send_finish(number)
        await first.finish(2)
    async with line.gateway() as second:
        await attach(second, 5)
        await second.finish(5)
        assert (second.received[5].text, second.received[5].token_ids) == (" one two three", ids)


async def test_a_stream_that_was_taken_over_ends_and_a_request_with_its_old_number_still_gets_its_parts(
    line: Line,
) -> None:
    async with line.gateway() as first:
        [number] = await line.open(first, 1)
    async with line.gateway() as second:
        opening = second.opening(1, request_id="r2", tenant="acme", num_prompt_tokens=3)
        await second.send(opening)
        other = (await line.engine.add(1)).stream_ids[0]
        await attach(second, 5)
        line.engine.send_finish(number)
        await second.finish(5)
        await second.send(parts=[AddPart(stream_id=1, prompt_ids=[7])])
        await line.engine.receives(
            lambda: [each.stream_id for each in line.engine.parts] == [other]
        )


async def test_a_choice_that_is_opened_again_while_it_runs_replaces_what_runs(line: Line) -> None:
    word = line.tokenizer.encode(" hello", add_special_tokens=False)[0]
    async with line.gateway() as gateway:
        [old] = await line.open(gateway, 1, attempt=1)
        line.engine.send_tokens({old: [word]})
        await until(gateway, {1: " hello"})
        [number] = await line.open(gateway, 2, attempt=2)
        line.engine.send_tokens({old: [word]}, first=1)
        line.engine.send_tokens({number: [word, word]})
        await until(gateway, {2: " hello hello"})
        assert (await gateway.finish(1)).reason == common_pb2.FINISH_REASON_CANCELLED
        await line.engine.receives(lambda: line.engine.cancels == {old: "superseded"})
