"""One multiplexed session with an output processor. Sorts frames to streams; knows nothing about
HTTP or JSON."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import grpc

from headwater.proto import common_pb2, engine_pb2, output_processor_pb2_grpc
from headwater.proto import output_processor_pb2 as pb
from headwater.services.runtime import errors
from headwater.services.runtime.channel import open_channel
from headwater.services.runtime.gateway_identity import NOBODY, Gateway
from headwater.services.runtime.grpc_errors import from_rpc_error
from headwater.services.runtime.session.calling import CallingEnd, Ending, keep_up
from headwater.services.runtime.session.controls import MAX_ITEMS, Controls
from headwater.services.runtime.session.silence import Silence
from headwater.services.runtime.tasks import owned_task

from .open_chunks import parts_of
from .stream_context import Found, contexts

MAX_JOINED_BYTES = 32 * 1024
"""Bytes of several requests in one frame: a write costs more than a short request."""
CONTEXT_BYTES = 128 * 1024
"""Bytes in one frame of what a resumable request's next gateway needs."""
FIND_SECONDS = 3.0
SILENCE_SECONDS = 5.0
"""Seconds of silence of a stream after which the gateway probes it, even if other streams of the
session send."""
Scores = Sequence[common_pb2.TokenLogprob]


class Receiver(Protocol):
    """The receiver of one stream. The session calls it in order and does not wait for it."""

    @property
    def received_at(self) -> float:
        """Time of the last message on the stream, on `time.perf_counter`."""

    def receive(
        self,
        first: int,
        token_ids: list[int],
        text: str,
        offset: int,
        now: float,
        logprobs: Scores,
        parts: pb.RowParts | None,
    ) -> None: ...
    def started(self, start: engine_pb2.Start) -> None: ...
    def prompt_scored(self, part: pb.OutputPromptLogprobs) -> None: ...
    def embedded(self, embedding: common_pb2.Embedding) -> None: ...
    def finished(self, finish: pb.OutputFinish) -> None: ...
    def lost(self, error: errors.HeadwaterError) -> None: ...


NO_LOGPROBS: tuple[common_pb2.TokenLogprob, ...] = ()


class OutputSession:
    """The stream of frames to and from one output processor, kept up by `run`."""

    def __init__(
        self,
        address: str,
        on_connected: Callable[[], None] = lambda: None,
        gateway: Gateway = NOBODY,
    ) -> None:
        self.address = address
        self._gateway = gateway
        self.connected = asyncio.Event()
        self.models: set[str] = set()
        """Models whose tokenizers the output processor has; empty until it reports them."""
        self._on_connected = on_connected
        self.leaving = False
        """The output processor ends the session with its last stream; no new streams come."""
        self._refuses = False
        """Whether the output processor has announced in a frame that it leaves, which may precede
        the membership's report."""
        self._streams: dict[int, Receiver] = {}
        self._ids = itertools.count(1)
        self._controls = Controls()
        self._adds: deque[pb.Keep | pb.Open | engine_pb2.AddPart | pb.Attach] = deque()
        self._let_go: list[pb.LetGo] = []
        self._recorded: list[str] = []
        """Ids of stored usage records. They go along with the next frame, and alone when that takes
        long."""
        self._is_recorded_due = False
        self._attaching: dict[int, Callable[[pb.Attached], None]] = {}
        """Callbacks by first stream id, called when a request goes on here."""
        self._stub: output_processor_pb2_grpc.OutputProcessorAsyncStub | None = None
        self._end = CallingEnd(self._next_frame, self._deliver, Silence(self._probe_any))

    @property
    def num_streams(self) -> int:
        return len(self._streams)

    @property
    def takes_streams(self) -> bool:
        return self.connected.is_set() and not self._refuses

    def open(
        self, request: pb.Open, receivers: Sequence[Receiver], context: bytes = b""
    ) -> list[int]:
        """Sends a request whose choices report to `receivers`; returns their stream ids.

        With the context that its next gateway needs, it can be resumed. Raises `Unavailable` while
        the session is down, `BadRequest` when the parameters exceed a frame.
        """
        if not self.connected.is_set():
            raise errors.Unavailable(
                "the output processor is out of reach", code="output_processor_unavailable"
            )
        ids = [next(self._ids) for _ in receivers]
        request.add.stream_ids[:] = ids
        request.resumable = bool(context)
        for start in range(0, len(context), CONTEXT_BYTES):
            self._adds.append(
                pb.Keep(stream_id=ids[0], context=context[start : start + CONTEXT_BYTES])
            )
        self._adds.extend(parts_of(request))
        self._streams.update(zip(ids, receivers, strict=True))
        self._end.wake()
        return ids

    async def find(self, request_id: str, tenant: str) -> Found:
        """Finds what the output processor keeps of a request. Raises `NotFound`, `Unavailable`."""
        if self._stub is None:
            raise errors.Unavailable(
                "the output processor is out of reach", code="output_processor_unavailable"
            )
        asked = pb.FindStreamRequest(request_id=request_id, tenant=tenant)
        try:
            parts = [part async for part in self._stub.FindStream(asked, timeout=FIND_SECONDS)]
        except grpc.aio.AioRpcError as failure:
            raise from_rpc_error(failure) from None
        return _found(self.address, request_id, parts)

    async def forget(self, request_id: str, tenant: str) -> None:
        """Drops what the output processor keeps of a request. Raises `NotFound`, `Unavailable`."""
        if self._stub is None:
            raise errors.Unavailable(
                "the output processor is out of reach", code="output_processor_unavailable"
            )
        try:
            await self._stub.ForgetStream(
                pb.FindStreamRequest(request_id=request_id, tenant=tenant), timeout=FIND_SECONDS
            )
        except grpc.aio.AioRpcError as failure:
            raise from_rpc_error(failure) from None

    def attach(
        self,
        request_id: str,
        tenant: str,
        receivers: Sequence[Receiver],
        on_attached: Callable[[pb.Attached], None],
        record_id: str = "",
    ) -> list[int]:
        """Takes a request over, whose choices report to `receivers` from their first token on;
        returns stream ids. `record_id` is of the usage record that this gateway will write, if it
        will.

        Raises `Unavailable` while the session is down.
        """
        if not self.connected.is_set():
            raise errors.Unavailable(
                "the output processor is out of reach", code="output_processor_unavailable"
            )
        ids = [next(self._ids) for _ in receivers]
        self._adds.append(
            pb.Attach(request_id=request_id, tenant=tenant, stream_ids=ids, record_id=record_id)
        )
        self._attaching[ids[0]] = on_attached
        self._streams.update(zip(ids, receivers, strict=True))
        self._end.wake()
        return ids

    def detach(self, stream_ids: Sequence[int], prompt_tokens: int, output_tokens: int) -> None:
        """Keeps a resumable request for its next reader; these numbers of its tokens are
        charged."""
        known = [
            stream_id for stream_id in stream_ids if self._streams.pop(stream_id, None) is not None
        ]
        for stream_id in known:
            self._controls.forget(stream_id)
        if known:
            self._let_go.append(
                pb.LetGo(stream_ids=known, prompt_tokens=prompt_tokens, output_tokens=output_tokens)
            )
            self._end.wake()

    def cancel(self, stream_id: int, reason: str) -> None:
        """Ends a stream: nothing is received from it afterwards. A stream that has ended already is
        ignored."""
        if self._streams.pop(stream_id, None) is not None:
            self._controls.cancel(engine_pb2.Cancel(stream_id=stream_id, reason=reason))
            self._end.wake()

    def recorded(self, record_id: str) -> None:
        """A usage record of requests on this session is stored."""
        self._recorded.append(record_id)

    def credit(self, stream_id: int, tokens: int) -> None:
        """Gives room for more tokens of a stream."""
        if stream_id in self._streams:
            self._controls.grant(stream_id, tokens)
            self._end.wake()

    async def run(self) -> None:
        """Connects, passes frames on until the session breaks, tells its streams, and starts again
        unless `leaving`."""
        await keep_up(
            self._run_session, "output session", self.address, is_over=lambda _: self.leaving
        )

    async def _run_session(self) -> Ending:
        async with open_channel(self.address) as channel:
            await channel.channel_ready()
            stub: output_processor_pb2_grpc.OutputProcessorAsyncStub
            stub = output_processor_pb2_grpc.OutputProcessorStub(channel)
            call = stub.Session(metadata=self._gateway.metadata)
            try:
                async with owned_task(self._probe()):
                    return await self._end.run(channel, call, lambda: self._on_proven(stub))
            finally:
                self._stub = None
                self.connected.clear()
                self._lose()

    def _on_proven(self, stub: output_processor_pb2_grpc.OutputProcessorAsyncStub) -> None:
        self._stub = stub
        self._refuses = False
        self.connected.set()
        self._on_connected()

    def _deliver(self, frame: pb.OutputFrame) -> None:
        """Sorts one frame to its streams. Rows of streams that were cancelled meanwhile are
        dropped."""
        now = time.perf_counter()
        streams = self._streams
        position = 0
        token_ids = frame.token_ids[:]
        for attached in frame.attached:
            if (on_attached := self._attaching.pop(attached.stream_ids[0], None)) is not None:
                on_attached(attached)
        for start in frame.starts:
            if (stream := streams.get(start.stream_id)) is not None:
                stream.started(start)
        for part in frame.prompt_logprobs:
            if (stream := streams.get(part.stream_id)) is not None:
                stream.prompt_scored(part)
        for embedding in frame.embeddings:
            if (stream := streams.get(embedding.stream_id)) is not None:
                stream.embedded(embedding)
        scored = {row.row: row.tokens for row in frame.logprobs} if frame.logprobs else None
        parts = {row.row: row for row in frame.parts} if frame.parts else None
        columns = (
            frame.stream_ids[:],
            frame.first_index[:],
            frame.num_tokens[:],
            frame.texts[:],
            frame.text_offset[:],
        )
        for row, (stream_id, first, count, text, offset) in enumerate(zip(*columns, strict=True)):
            end = position + count
            if (stream := streams.get(stream_id)) is not None:
                logprobs = scored.get(row, NO_LOGPROBS) if scored is not None else NO_LOGPROBS
                beside = parts.get(row) if parts is not None else None
                stream.receive(first, token_ids[position:end], text, offset, now, logprobs, beside)
            position = end
        for finish in frame.finishes:
            self._refuses |= finish.cause == common_pb2.LOSS_CAUSE_OUTPUT_PROCESSOR_LEAVING
            if (stream := streams.pop(finish.stream_id, None)) is not None:
                self._controls.forget(finish.stream_id)
                stream.finished(finish)

    async def _probe(self) -> None:
        """Probes streams that have been silent for long: they may wait, or be unknown there. Runs
        until cancelled."""
        while True:
            await asyncio.sleep(SILENCE_SECONDS)
            self._is_recorded_due = True
            self.probe(time.perf_counter() - SILENCE_SECONDS)

    def probe(self, since: float) -> None:
        """Asks for streams that are silent since then; not while requests wait to be sent, lest it
        overtake them."""
        if not self._adds:
            for stream_id, stream in self._streams.items():
                if stream.received_at < since:
                    self._controls.probe(stream_id)
            self._end.wake()

    def _probe_any(self) -> bool:
        """Probes any one stream, so that the output processor has to answer. Returns False when
        there is none."""
        if self._streams and not self._adds:
            self._controls.probe(next(iter(self._streams)))
            self._end.wake()
        return bool(self._streams)

    def _next_frame(self) -> pb.GatewayFrame | None:
        """The next frame: all cancels and credits, then a part of one prompt or several short
        prompts."""
        is_due = self._is_recorded_due and self._recorded
        if not (is_due or self._controls or self._adds or self._let_go):
            return None
        frame = pb.GatewayFrame(
            let_go=self._let_go[:MAX_ITEMS], recorded=self._recorded[:MAX_ITEMS]
        )
        del self._let_go[:MAX_ITEMS]
        del self._recorded[:MAX_ITEMS]
        self._is_recorded_due = bool(is_due and self._recorded)
        self._controls.put_into(frame)
        num_bytes = 0
        while self._adds:
            if len(self._adds) > 1 or num_bytes:
                num_bytes += self._adds[0].ByteSize()
                # The parts of a long prompt are sent one by one, so that others come between them.
                is_alone = num_bytes > MAX_JOINED_BYTES or isinstance(
                    self._adds[0], engine_pb2.AddPart
                )
                if is_alone and (frame.opens or frame.parts or frame.keeps):
                    break
            self._put(self._adds.popleft(), frame)
        return frame if frame.ByteSize() else None

    def _put(
        self, item: pb.Keep | pb.Open | engine_pb2.AddPart | pb.Attach, frame: pb.GatewayFrame
    ) -> None:
        """Puts an item in the frame, unless it was cancelled while it waited: it must not overtake
        its cancel."""
        if isinstance(item, pb.Open):
            if not self._streams.keys().isdisjoint(item.add.stream_ids):
                frame.opens.append(item)
        elif isinstance(item, pb.Attach):
            if not self._streams.keys().isdisjoint(item.stream_ids):
                frame.attaches.append(item)
        elif isinstance(item, pb.Keep):
            if item.stream_id in self._streams:
                frame.keeps.append(item)
        elif item.stream_id in self._streams:
            frame.parts.append(item)

    def _lose(self) -> None:
        streams = self._streams
        self._streams = {}
        self._controls.clear()
        self._adds.clear()
        self._let_go.clear()
        self._attaching.clear()
        for stream in streams.values():
            stream.lost(
                errors.Unavailable(
                    "the output processor is gone", code="output_processor_unavailable"
                )
            )


def _found(address: str, request_id: str, parts: Sequence[pb.FoundStream]) -> Found:
    first = parts[0]
    return Found(
        address=address,
        request_id=request_id,
        context=contexts.decode(b"".join(part.context for part in parts)),
        granted=list(first.granted),
        num_tokens=list(first.num_tokens),
        has_ended=first.ended,
        prompt_tokens=first.prompt_tokens,
        output_tokens=first.output_tokens,
        num_readers=first.num_readers,
        attempt=first.attempt,
    )
