"""A session with an output processor: what goes out in which frame, and to whom what comes back
belongs."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from headwater.gateway.stages.output_session import OutputSession
from headwater.gateway.stages.output_sessions import OutputSessions
from headwater.proto import common_pb2, engine_pb2, output_processor_pb2_grpc
from headwater.proto.output_processor_pb2 import GatewayFrame, Open, OutputFinish, OutputFrame
from headwater.services.runtime.errors import BadRequest, HeadwaterError, Unavailable
from headwater.services.runtime.session import silence

MAX_FRAME_BYTES = 256 * 1024


class Peer(output_processor_pb2_grpc.OutputProcessorServicer):
    """The other end of sessions: keeps what it hears, says what it is told to."""

    def __init__(self) -> None:
        self.received: asyncio.Queue[GatewayFrame] = asyncio.Queue()
        self.to_send: asyncio.Queue[OutputFrame | None] = asyncio.Queue()
        self.address = ""

    async def served(self) -> grpc.aio.Server:
        server = grpc.aio.server()
        output_processor_pb2_grpc.add_OutputProcessorServicer_to_server(self, server)
        self.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        return server

    async def Session(self, request_iterator: Any, context: Any) -> AsyncIterator[OutputFrame]:
        async def listen() -> None:
            async for frame in request_iterator:
                self.received.put_nowait(frame)

        listening = asyncio.create_task(listen())
        try:
            while (frame := await self.to_send.get()) is not None:
                yield frame
        finally:
            listening.cancel()


class Heard:
    """A stream's owner that keeps what it is told."""

    def __init__(self) -> None:
        self.received_at = float("inf")
        self.texts: list[str] = []
        self.token_ids: list[int] = []
        self.ends: list[OutputFinish | HeadwaterError] = []
        self.ended = asyncio.Event()

    def receive(self, first: int, token_ids: list[int], text: str, *_: Any) -> None:
        assert first == len(self.token_ids)
        self.texts.append(text)
        self.token_ids += token_ids

    def started(self, start: engine_pb2.Start) -> None:
        self.texts.append(f"<{start.cached_tokens}>")

    def prompt_scored(self, part: Any) -> None: ...

    def finished(self, finish: OutputFinish) -> None:
        self.ends.append(finish)
        self.ended.set()

    def lost(self, error: HeadwaterError) -> None:
        self.ends.append(error)
        self.ended.set()


@contextlib.asynccontextmanager
async def connected() -> AsyncIterator[tuple[Peer, OutputSession]]:
    async with peers(1) as (sessions, (peer,)):
        yield peer, sessions.at(peer.address)


@contextlib.asynccontextmanager
async def peers(count: int) -> AsyncIterator[tuple[OutputSessions, list[Peer]]]:
    """All connected."""
    sessions = OutputSessions()
    there = [Peer() for _ in range(count)]
    servers = [await peer.served() for peer in there]
    try:
        async with asyncio.timeout(60):
            for peer in there:
                sessions.join(peer.address)
                await sessions.at(peer.address).connected.wait()
            yield sessions, there
    finally:
        await sessions.close()
        for server in servers:
            await server.stop(None)


def drained(queue: asyncio.Queue[GatewayFrame]) -> list[GatewayFrame]:
    return [queue.get_nowait() for _ in range(queue.qsize())]


def opening(num_prompt_tokens: int = 4, **sampling: Any) -> Open:
    add = engine_pb2.Add(
        prompt_ids=range(num_prompt_tokens), sampling=common_pb2.Sampling(**sampling)
    )
    return Open(engine_address="engine", add=add)


async def test_a_frame_is_sorted_to_its_streams_and_the_rest_is_dropped() -> None:
    async with connected() as (peer, session):
        first = Heard()
        second = Heard()
        a, b = session.open(opening(), [first, second])
        frame = OutputFrame(
            stream_ids=[b, 999, a],
            first_index=[0, 0, 0],
            num_tokens=[2, 1, 1],
            token_ids=[5, 6, 7, 8],
            texts=["bb", "?", "a"],
            text_offset=[0, 0, 0],
            starts=[engine_pb2.Start(stream_id=a, cached_tokens=3)],
            finishes=[
                OutputFinish(stream_id=each, reason=common_pb2.FINISH_REASON_STOP)
                for each in (a, b, 999)
            ],
        )
        peer.to_send.put_nowait(frame)
        await second.ended.wait()
        assert (first.texts, first.token_ids) == (["<3>", "a"], [8])
        assert (second.texts, second.token_ids) == (["bb"], [5, 6])
        assert session.num_streams == 0


async def test_a_long_prompt_goes_out_in_parts_far_below_a_frame_and_a_cancel_overtakes_them() -> (
    None
):
    async with connected() as (peer, session):
        ids = session.open(opening(100_000), [Heard()])
        session.cancel(session.open(opening(100_000), [Heard()])[0], "client_gone")
        first = await peer.received.get()
        assert [cancel.stream_id for cancel in first.cancels] == [2]
        parts = list(first.opens[0].add.prompt_ids)
        assert first.opens[0].add.num_prompt_tokens == 100_000
        assert first.ByteSize() < MAX_FRAME_BYTES
        while len(parts) < 100_000:
            frame = await peer.received.get()
            assert frame.ByteSize() < MAX_FRAME_BYTES
            assert [part.stream_id for part in frame.parts] == ids
            parts += frame.parts[0].prompt_ids
        assert parts == list(range(100_000))
        session.credit(ids[0], 5)
        session.credit(ids[0], 6)
        frame = await peer.received.get()
        assert not frame.opens
        assert [(credit.stream_id, credit.tokens) for credit in frame.credits] == [(ids[0], 11)]


async def test_parameters_that_fill_a_frame_are_refused_by_name() -> None:
    async with connected() as (_, session):
        with pytest.raises(BadRequest, match="allowed_token_ids has 100000 entries") as refused:
            session.open(opening(allowed_token_ids=range(100_000)), [Heard()])
        assert refused.value.param == "allowed_token_ids"
        assert session.num_streams == 0


async def test_the_end_of_a_session_ends_every_stream_and_a_new_one_begins() -> None:
    async with connected() as (peer, session):
        received = Heard()
        session.open(opening(), [received])
        peer.to_send.put_nowait(None)
        await received.ended.wait()
        (error,) = received.ends
        assert isinstance(error, Unavailable)
        assert error.code == "output_processor_unavailable"
        with pytest.raises(Unavailable):
            session.open(opening(), [Heard()])
        await session.connected.wait()
        assert session.open(opening(), [Heard()])


async def test_an_error_in_a_receiver_ends_one_session_and_not_those_that_follow() -> None:
    class Faulty(Heard):
        def started(self, start: engine_pb2.Start) -> None:
            raise RuntimeError("a fault in a receiver")

    async with connected() as (peer, session):
        faulty = Faulty()
        (stream_id,) = session.open(opening(), [faulty])
        peer.to_send.put_nowait(OutputFrame(starts=[engine_pb2.Start(stream_id=stream_id)]))
        await faulty.ended.wait()
        assert isinstance(faulty.ends[0], Unavailable)
        await session.connected.wait()
        assert session.open(opening(), [Heard()])


async def test_an_output_processor_that_announces_its_end_gets_no_more_streams_until_it_is_replaced() -> (
    None
):
    async with peers(2) as (sessions, there):
        session = sessions.pick("engine")
        peer = next(each for each in there if each.address == session.address)
        refused = Heard()
        (stream_id,) = session.open(opening(), [refused])
        cause = common_pb2.LOSS_CAUSE_OUTPUT_PROCESSOR_LEAVING
        peer.to_send.put_nowait(
            OutputFrame(finishes=[OutputFinish(stream_id=stream_id, retriable=True, cause=cause)])
        )
        await refused.ended.wait()
        assert sessions.pick("engine") is not session
        peer.to_send.put_nowait(None)
        while sessions.pick("engine") is not session:  # noqa: ASYNC110 (a network)
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("is_over", [False, True], ids=["while they run", "when they have ended"])
async def test_an_output_processor_that_is_back_while_its_streams_run_keeps_its_session(
    is_over: bool,
) -> None:
    """An output processor leaves and joins again if it answers no probe for a moment while NATS is
    away."""
    async with peers(1) as (sessions, (peer,)):
        session = sessions.pick("engine")
        received = Heard()
        (stream_id,) = session.open(opening(), [received])
        sessions.leave(peer.address)
        finish = OutputFinish(stream_id=stream_id, reason=common_pb2.FINISH_REASON_STOP)
        if is_over:
            peer.to_send.put_nowait(OutputFrame(finishes=[finish]))
            await received.ended.wait()
        sessions.join(peer.address)
        assert sessions.pick("engine") is session
        assert list(sessions._tasks) == [session]
        sessions.leave(peer.address)
        sessions.join(peer.address)
        # A session without streams ends at once, and another one begins.
        assert (sessions.at(peer.address) is session) is not is_over


async def test_an_engine_keeps_its_output_processor_as_others_come_and_go() -> None:
    sessions = OutputSessions()
    for i in range(4):
        sessions.join(f"127.0.0.1:{i + 1}")
        sessions._sessions[f"127.0.0.1:{i + 1}"].connected.set()
    engines = [f"engine-{i}" for i in range(100)]
    before = {engine: sessions.pick(engine).address for engine in engines}
    assert len(set(before.values())) == 4
    sessions.leave("127.0.0.1:3")
    after = {engine: sessions.pick(engine).address for engine in engines}
    assert all(after[engine] == home for engine, home in before.items() if home != "127.0.0.1:3")
    await sessions.close()
    with pytest.raises(Unavailable, match="no output processor"):
        OutputSessions().pick("engine")


async def test_a_resumed_output_goes_out_in_parts_as_a_prompt_does() -> None:
    async with connected() as (peer, session):
        request = opening(3)
        request.add.output_ids[:] = range(40_000)
        ids = session.open(request, [Heard()])
        first = await peer.received.get()
        parts = list[int]()
        assert (first.opens[0].add.num_output_tokens, len(first.opens[0].add.output_ids)) == (
            40_000,
            0,
        )
        while len(parts) < 40_000:
            frame = await peer.received.get()
            assert frame.ByteSize() < MAX_FRAME_BYTES
            assert [part.stream_id for part in frame.parts] == ids
            parts += frame.parts[0].output_ids
        assert parts == list(range(40_000))


async def test_streams_that_are_silent_are_asked_for_and_no_others() -> None:
    async with connected() as (peer, session):
        silent = Heard()
        received = Heard()
        gone = Heard()
        silent.received_at = 100.0
        received.received_at = 108.0
        gone.received_at = 100.0
        ids = session.open(opening(), [silent, received, gone])
        session.probe(since=105.0)
        assert not (await peer.received.get()).probed, "it would overtake the request"
        session.cancel(ids[2], "client_gone")
        session.probe(since=105.0)
        assert list((await peer.received.get()).probed) == ids[:1]


async def test_an_output_processor_that_says_nothing_when_it_is_asked_loses_its_streams(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with connected() as (peer, session):
        idle = asyncio.create_task(asyncio.sleep(0.3))
        monkeypatch.setattr(silence, "TICK_SECONDS", 0.01)
        await idle
        assert session.connected.is_set(), "without streams it owes no answer"
        stream = Heard()
        [number] = session.open(opening(), [stream])
        await stream.ended.wait()
        assert [str(end) for end in stream.ends] == ["the output processor is gone"]
        asked = [frame.probed for frame in drained(peer.received) if frame.probed]
        assert asked
        assert all(each == [number] for each in asked)


async def test_an_output_processor_that_has_nothing_to_say_but_answers_keeps_its_streams(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with connected() as (peer, session):
        # An answer may take a second on a busy machine.
        monkeypatch.setattr(silence, "TICK_SECONDS", 0.1)
        stream = Heard()
        session.open(opening(), [stream])
        num_asked = 0
        while num_asked * silence.PROBE_TICKS < 1.5 * silence.LOST_TICKS:
            num_asked += bool((await peer.received.get()).probed)
            peer.to_send.put_nowait(OutputFrame(answered=True))
        assert not stream.ends


async def test_frames_of_an_abandoned_stream_are_dropped() -> None:
    async with connected() as (peer, session):
        first = Heard()
        second = Heard()
        (a,) = session.open(opening(), [first])
        session.cancel(a, "attempt_lost")
        (b,) = session.open(opening(), [second])
        assert b != a
        columns = {
            "first_index": [0, 0],
            "num_tokens": [1, 1],
            "texts": ["late", "b"],
            "text_offset": [0, 0],
        }
        finishes = [
            OutputFinish(stream_id=each, reason=common_pb2.FINISH_REASON_STOP) for each in (a, b)
        ]
        peer.to_send.put_nowait(
            OutputFrame(stream_ids=[a, b], token_ids=[6, 7], finishes=finishes, **columns)
        )
        await second.ended.wait()
        assert (first.texts, first.ends, second.texts) == ([], [], ["b"])
