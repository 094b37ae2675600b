"""One session with each engine, shared by all gateways: requests down, token frames up, stream ids renumbered.

Reading never waits for a stream. Knows nothing about text.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import grpc
import structlog

from headwater.proto import common_pb2, engine_pb2, engine_pb2_grpc
from headwater.proto.engine_pb2 import Add, AddPart, Cancel, ClientFrame, Credit, EngineFrame
from headwater.proto.output_processor_pb2 import Open

from ..runtime.call_proof import Impostor
from ..runtime.channel import open_channel
from ..runtime.tasks import end, log_failure, owned_task
from . import metrics as output_metrics
from .pace import Pace
from .silence import Silence
from .stream import OutputStream
from .token_logprobs import entries_by_position

INTRODUCTION_SECONDS = 3.0
"""Time for an engine to accept a connection and say who it is."""
MAX_SMALL_ITEMS = 1024
"""Most cancels, credits and probes in one frame, of each."""
FULL_FRAME_BYTES = 240 * 1024
"""A frame takes more items until it has this size; the items of one gateway's frame fit in one."""
HIGHEST_STREAM_ID = 2**32 - 1


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

    def __init__(self, address: str) -> None:
        self.address = address
        self._requests: dict[int, Request] = {}
        """By each of the engine's stream ids."""
        self._queue: deque[tuple[Request, Add | AddPart]] = deque()
        self._cancels: deque[Cancel] = deque()
        self._credits: dict[int, int] = {}
        self._pace = Pace()
        self._probes: set[int] = set()
        self._last_id = 0
        self._epoch = 0
        self._wake = asyncio.Event()
        self._silence = Silence(self._probe_any)
        self._cause: common_pb2.LossCause.ValueType = common_pb2.LOSS_CAUSE_ENGINE_GONE
        """Cause of the loss of streams that the engine has."""

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
        self._wake.set()
        return request

    def extend(self, request: Request, part: AddPart) -> None:
        """Queues more of a request."""
        part.stream_id = request.first
        self._queue.append((request, part))
        self._wake.set()

    def grant(self, number: int, tokens: int) -> None:
        if number in self._requests:
            self._give(number, self._pace.granted(number, tokens))

    def on_delivered(self, number: int, tokens: int) -> None:
        """So many more of a stream's tokens have left for the gateway."""
        if given := self._pace.on_delivered(number, tokens):
            self._give(number, given)

    def _give(self, number: int, tokens: int) -> None:
        if tokens:
            self._credits[number] = self._credits.get(number, 0) + tokens
            self._wake.set()

    def probe(self, number: int) -> None:
        """Has the engine end the stream if it does not have it."""
        if (request := self._requests.get(number)) is not None and request.is_sent:
            self._probes.add(number)
            self._wake.set()

    def cancel(self, number: int, reason: str) -> None:
        """Forgets a stream and ends it at the engine; one that has ended is left alone."""
        if (request := self._forget(number)) is None:
            return
        cancel = Cancel(stream_id=number, reason=reason)
        if request.is_sent:
            self._cancels.append(cancel)
            self._wake.set()
        else:
            request.early_cancels.append(cancel)

    async def run(self) -> None:
        """Runs the session until it breaks, then fails the streams that are left."""
        try:
            problem = await self._run_session()
        finally:
            self._lose()
        output_metrics.ENGINES_LOST.inc()
        structlog.get_logger().warning("engine session lost", engine=self.address, problem=problem)

    async def _run_session(self) -> str:
        """One session to its end; returns what ended it."""
        try:
            async with open_channel(self.address) as channel:
                stub = engine_pb2_grpc.EngineStub(channel)
                # Before Info: should the engine be replaced between the two, the session breaks.
                call = stub.Session()
                await channel.proven(call)
                info = await stub.Info(engine_pb2.InfoRequest(), timeout=INTRODUCTION_SECONDS)
                self._epoch = info.incarnation.epoch
                async with owned_task(self._write(call)), owned_task(self._silence.until_lost()) as silence:
                    reading = asyncio.ensure_future(self._read(call))
                    try:
                        await asyncio.wait((reading, silence), return_when=asyncio.FIRST_COMPLETED)
                        if reading.done():
                            reading.result()
                            return "it ended the session"
                    finally:
                        await end(reading)
            self._cause = common_pb2.LOSS_CAUSE_SILENT
            return "it says nothing, not even when it is asked"
        except grpc.aio.AioRpcError as failure:
            return failure.details() or failure.code().name
        except Impostor as stranger:
            return str(stranger)
        except ValueError as failure:
            return f"it sent a frame that cannot be read: {failure}"

    async def _read(self, call: grpc.aio.StreamStreamCall[ClientFrame, EngineFrame]) -> None:
        while (frame := await call.read()) is not grpc.aio.EOF:
            assert isinstance(frame, EngineFrame)
            self._silence.on_frame()
            with output_metrics.FRAME_SECONDS.time():
                self._take(frame)

    def _probe_any(self) -> bool:
        """Probes a stream that the engine has; False when it has none."""
        sent = next((number for number, request in self._requests.items() if request.is_sent), None)
        if sent is not None:
            self.probe(sent)
        return sent is not None

    def _take(self, frame: EngineFrame) -> None:
        """Hands one frame to its streams; rows of streams that ended here are dropped."""
        requests, token_ids, position = self._requests, frame.token_ids[:], 0
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
        for number, first, count in zip(frame.stream_ids[:], frame.first_index[:], frame.num_tokens[:], strict=True):
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

    async def _write(self, call: grpc.aio.StreamStreamCall[ClientFrame, EngineFrame]) -> None:
        # A call that has ended refuses what is written; why it ended is the reader's to say.
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            while True:
                for frame in self._frames():
                    await call.write(frame)
                await self._wake.wait()
                self._wake.clear()

    def _frames(self) -> Iterator[ClientFrame]:
        """Empties the queues: cancels overtake requests that wait, except those of the request itself."""
        while self._cancels or self._credits or self._probes or self._queue:
            frame = ClientFrame(cancels=self._next_cancels(), credits=self._next_credits(), asked=self._next_probes())
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
                yield frame

    def _next_cancels(self) -> list[Cancel]:
        return [self._cancels.popleft() for _ in range(min(MAX_SMALL_ITEMS, len(self._cancels)))]

    def _next_credits(self) -> list[Credit]:
        numbers = list(self._credits)[:MAX_SMALL_ITEMS]
        return [Credit(stream_id=number, tokens=self._credits.pop(number)) for number in numbers]

    def _next_probes(self) -> list[int]:
        return [self._probes.pop() for _ in range(min(MAX_SMALL_ITEMS, len(self._probes)))]

    def _put_next(self, frame: ClientFrame) -> bool:
        """Whether the frame may take more: one part of a long prompt, and nothing behind a choice's own cancel."""
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
        self._cancels.extend(request.early_cancels)
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
            self._credits.pop(number, None)
            self._probes.discard(number)
        return request

    def _lose(self) -> None:
        for number, request in list(self._requests.items()):
            stream = request.streams[number]
            self._forget(number)
            # What never reached it cannot be why it died.
            cause = self._cause if request.is_sent else common_pb2.LOSS_CAUSE_REFUSED
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

    def to(self, address: str) -> EngineLink:
        if (link := self._links.get(address)) is None:
            link = self._links[address] = EngineLink(address)
            task = asyncio.ensure_future(self._run(link))
            task.add_done_callback(log_failure)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return link

    async def _run(self, link: EngineLink) -> None:
        """A link that broke is gone before the next request needs one."""
        try:
            await link.run()
        finally:
            del self._links[link.address]
