"""One session with each engine, shared by all gateways: requests down, token frames up, stream ids
renumbered.

Reading never waits for a stream. Knows nothing about text.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any

import structlog

from headwater.proto import common_pb2, engine_pb2, engine_pb2_grpc
from headwater.proto.engine_pb2 import Add, AddPart, Cancel, ClientFrame, EngineFrame
from headwater.proto.output_processor_pb2 import Open

from ..runtime.channel import open_channel
from ..runtime.session.calling import CallingEnd, Cause, Channel, Ending
from ..runtime.session.controls import Controls
from ..runtime.session.pace import Pace
from ..runtime.session.silence import Silence
from ..runtime.tasks import end, start_in
from . import metrics as output_metrics
from .stream import OutputStream
from .token_logprobs import entries_by_position

INTRODUCTION_SECONDS = 3.0
"""Time for an engine to accept a connection and say who it is."""
FULL_FRAME_BYTES = 240 * 1024
"""A frame takes more items until it has this size; the items of one gateway's frame fit in one."""
HIGHEST_STREAM_ID = 2**32 - 1


@dataclass(frozen=True, slots=True)
class EngineCall:
    """A call of an engine's session: what carries its frames, and how the engine's epoch is
    learnt."""

    channel: Channel
    call: Any
    learn_epoch: Callable[[], Awaitable[int]]


Connect = Callable[[str], AbstractAsyncContextManager[EngineCall]]
"""Calls the engine at an address inside the `with` block."""


@contextlib.asynccontextmanager
async def call_engine(address: str) -> AsyncIterator[EngineCall]:
    """A call over gRPC."""
    async with open_channel(address) as channel:
        stub = engine_pb2_grpc.EngineStub(channel)

        async def learn_epoch() -> int:
            # Behind the session's call: should the engine be replaced between the two, the
            # session breaks.
            info = await stub.Info(engine_pb2.InfoRequest(), timeout=INTRODUCTION_SECONDS)
            return info.incarnation.epoch

        yield EngineCall(channel, stub.Session(), learn_epoch)


@dataclass(slots=True, kw_only=True)
class Request:
    """Choices that enter the engine together."""

    engine: str
    """Replica id, for messages."""
    epoch: int
    first: int
    """Stream id that parts of the request name."""
    streams: dict[int, OutputStream]
    """Streams that have not ended, by the engine's stream ids."""
    is_sent: bool = False
    early_cancels: list[Cancel] = field(default_factory=list)
    """Cancels of single choices, sent right after the request."""


class EngineLink:
    """The session with the engine at one address, from its first request until it breaks."""

    def __init__(self, address: str, connect: Connect = call_engine) -> None:
        self.address = address
        self._connect = connect
        self._requests: dict[int, Request] = {}
        """Keyed by each of the engine's stream ids."""
        self._queue: deque[tuple[Request, Add | AddPart]] = deque()
        self._controls = Controls()
        self._pace = Pace()
        self._last_id = 0
        self._epoch = 0
        self._end = CallingEnd(self._next_frame, self._on_frame, Silence(self._probe_any))

    @property
    def num_requests(self) -> int:
        """Requests that have not ended."""
        return len({request.first for request in self._requests.values()})

    def open(self, opening: Open, streams: Sequence[OutputStream], *, is_paced: bool) -> Request:
        """Queues a request. A paced one's credit goes on as `on_delivered` reports its tokens."""
        numbers = [self._new_id() for _ in streams]
        request = Request(
            engine=opening.replica_id,
            epoch=opening.epoch,
            first=numbers[0],
            streams=dict(zip(numbers, streams, strict=True)),
        )
        self._requests.update(dict.fromkeys(numbers, request))
        opening.add.stream_ids[:] = numbers
        if is_paced:
            opening.add.credit = self._pace.open(numbers, opening.add.credit)
        self._queue.append((request, opening.add))
        self._end.wake()
        return request

    def extend(self, request: Request, part: AddPart) -> None:
        """Queues more of a request."""
        part.stream_id = request.first
        self._queue.append((request, part))
        self._end.wake()

    def grant(self, number: int, tokens: int) -> None:
        if number in self._requests:
            self._give(number, self._pace.granted(number, tokens))

    def on_delivered(self, number: int, tokens: int) -> None:
        """Takes the number of a stream's tokens that have just left for the gateway."""
        if given := self._pace.on_delivered(number, tokens):
            self._give(number, given)

    def _give(self, number: int, tokens: int) -> None:
        if tokens:
            self._controls.grant(number, tokens)
            self._end.wake()

    def probe(self, number: int) -> None:
        """Has the engine end the stream if it does not have it."""
        if (request := self._requests.get(number)) is not None and request.is_sent:
            self._controls.probe(number)
            self._end.wake()

    def cancel(self, number: int, reason: str) -> None:
        """Forgets a stream and ends it at the engine; one that has ended is left alone."""
        if (request := self._forget(number)) is None:
            return
        cancel = Cancel(stream_id=number, reason=reason)
        if request.is_sent:
            self._controls.cancel(cancel)
            self._end.wake()
        else:
            request.early_cancels.append(cancel)

    async def run(self) -> None:
        """Runs the session until it breaks, then fails the streams that are left."""
        cause = common_pb2.LOSS_CAUSE_ENGINE_GONE
        try:
            ending = await self._run_session()
            if ending.cause is Cause.SILENT:
                cause = common_pb2.LOSS_CAUSE_SILENT
        finally:
            self._lose(cause)
        output_metrics.ENGINES_LOST.inc()
        structlog.get_logger().warning(
            "engine session lost", engine=self.address, problem=ending.problem
        )

    async def _run_session(self) -> Ending:
        async with self._connect(self.address) as engine:

            async def learn_epoch() -> None:
                self._epoch = await engine.learn_epoch()

            return await self._end.run(engine.channel, engine.call, learn_epoch)

    def _on_frame(self, frame: EngineFrame) -> None:
        with output_metrics.FRAME_SECONDS.time():
            self._take(frame)

    def _probe_any(self) -> bool:
        """Probes a stream that the engine has; False when it has none."""
        sent = next((number for number, request in self._requests.items() if request.is_sent), None)
        if sent is not None:
            self.probe(sent)
        return sent is not None

    def _take(self, frame: EngineFrame) -> None:
        """Hands one frame to its streams; rows of ended streams are dropped."""
        requests = self._requests
        token_ids = frame.token_ids[:]
        position = 0
        output_metrics.ENGINE_FRAMES.inc()
        output_metrics.TOKENS.inc(len(token_ids))
        entries = entries_by_position(frame.logprobs) if frame.HasField("logprobs") else None
        for start in frame.starts:
            if (stream := self._stream(start.stream_id)) is not None:
                stream.start(start)
        for part in frame.prompt_logprobs:
            if (stream := self._stream(part.stream_id)) is not None:
                stream.add_prompt_logprobs(part)
        for embedding in frame.embeddings:
            if (stream := self._stream(embedding.stream_id)) is not None:
                stream.add_embedding(embedding)
        for number, first, count in zip(
            frame.stream_ids[:], frame.first_index[:], frame.num_tokens[:], strict=True
        ):
            end = position + count
            if count and (request := requests.get(number)) is not None:
                stream = request.streams[number]
                stream.push(first, token_ids[position:end], entries, position)
                if stream.ended:
                    self.cancel(number, "stop_string" if stream.is_stopped else "fault")
            position = end
        for finish in frame.finishes:
            if (stream := self._stream(finish.stream_id)) is not None:
                self._forget(finish.stream_id)
                stream.finish(finish)

    def _stream(self, number: int) -> OutputStream | None:
        request = self._requests.get(number)
        return request.streams[number] if request is not None else None

    def _next_frame(self) -> ClientFrame | None:
        """The next frame: cancels overtake requests that wait, except those of the request
        itself."""
        while self._controls or self._queue:
            frame = ClientFrame()
            self._controls.put_into(frame)
            num_bytes = frame.ByteSize()
            while self._queue:
                # NOTE: ByteSize encodes the message.
                size = self._queue[0][1].ByteSize()
                if num_bytes and num_bytes + size > FULL_FRAME_BYTES:
                    break
                num_bytes += size
                if not self._put_next(frame):
                    break
            if frame.ByteSize():
                return frame
        return None

    def _put_next(self, frame: ClientFrame) -> bool:
        """Whether the frame may take more: one part of a long prompt, and nothing behind a choice's
        own cancel."""
        request, item = self._queue.popleft()
        if not request.streams:
            return True
        if request.epoch != self._epoch:
            self._refuse(request)
            return True
        if isinstance(item, AddPart):
            frame.parts.append(item)
            return False
        frame.adds.append(item)
        request.is_sent = True
        for cancel in request.early_cancels:
            self._controls.cancel(cancel)
        return not request.early_cancels

    def _refuse(self, request: Request) -> None:
        for number, stream in list(request.streams.items()):
            self._forget(number)
            error = f"engine {request.engine} is gone: another one answers at {self.address}"
            stream.fail(error, cause=common_pb2.LOSS_CAUSE_REFUSED)

    def _forget(self, number: int) -> Request | None:
        if (request := self._requests.pop(number, None)) is not None:
            del request.streams[number]
            self._pace.forget(number)
            self._controls.forget(number)
        return request

    def _lose(self, cause_if_sent: common_pb2.LossCause.ValueType) -> None:
        for number, request in list(self._requests.items()):
            stream = request.streams[number]
            self._forget(number)
            # A request that never reached the engine cannot be why it died.
            cause = cause_if_sent if request.is_sent else common_pb2.LOSS_CAUSE_REFUSED
            state = "silent" if cause == common_pb2.LOSS_CAUSE_SILENT else "gone"
            stream.fail(f"engine {request.engine} is {state}", cause=cause)

    def _new_id(self) -> int:
        while True:
            self._last_id = self._last_id % HIGHEST_STREAM_ID + 1
            if self._last_id not in self._requests:
                return self._last_id


class EngineLinks:
    """The sessions with all engines; each begins with the first request for its engine."""

    def __init__(self) -> None:
        self._links: dict[str, EngineLink] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> EngineLinks:
        return self

    async def __aexit__(self, *_: object) -> None:
        await end(*self._tasks)

    def num_requests(self) -> int:
        """Requests at all engines that have not ended."""
        return sum(link.num_requests for link in self._links.values())

    def to(self, address: str) -> EngineLink:
        if (link := self._links.get(address)) is None:
            link = self._links[address] = EngineLink(address)
            start_in(self._tasks, self._run(link))
        return link

    async def _run(self, link: EngineLink) -> None:
        """A link that broke is gone before the next request needs one."""
        try:
            await link.run()
        finally:
            del self._links[link.address]
