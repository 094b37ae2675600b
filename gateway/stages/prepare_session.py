"""The stream of requests to one processor: a frame takes all that wait, where a call of its own would cost each of them
more than being prepared does.

Knows nothing about which processor is asked, nor what becomes of a request whose session is lost.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable

import grpc
import structlog
from google.rpc import status_pb2

from headwater.proto import processor_pb2_grpc
from headwater.proto.processor_pb2 import PrepareCall, PreparedCall, PreparedFrame, PrepareFrame, PrepareReply
from headwater.services.runtime import errors
from headwater.services.runtime.call_proof import Impostor, StageChannel
from headwater.services.runtime.grpc_errors import from_status
from headwater.services.runtime.tasks import end

MAX_CALL_BYTES = 64 * 1024
"""Longer requests go by themselves: what a call costs is little beside them, and others need not wait for them."""
MAX_FRAME_BYTES = 192 * 1024
RECONNECT_SECONDS = 0.2
Waiting = asyncio.Future[PreparedCall]


class NoSessions(Exception):
    """The processor takes calls alone, which was not known yet."""


class PrepareSession:
    """Kept up by `run`; others may `prepare` while it `is_open`."""

    def __init__(
        self,
        address: str,
        channel: StageChannel,
        stub: processor_pb2_grpc.ProcessorAsyncStub,
        *,
        on_open: Callable[[], None],
    ) -> None:
        self.is_open = False
        self._address, self._channel, self._stub = address, channel, stub
        self._on_open = on_open
        self._ids = itertools.count(1)
        self._waiting: dict[int, Waiting] = {}
        """Futures of the answers, by call."""
        self._calls: list[PrepareCall] = []
        self._cancels: list[int] = []
        self._wake = asyncio.Event()

    async def prepare(self, call: PrepareCall, seconds: float) -> PrepareReply:
        """Raises the named error of the stage, `Unavailable` when the session is lost meanwhile, `NoSessions`."""
        call.id, loop = next(self._ids), asyncio.get_running_loop()
        waiting: Waiting = loop.create_future()
        self._waiting[call.id] = waiting
        self._calls.append(call)
        self._wake.set()
        timer = loop.call_later(seconds, _give_up, waiting)
        try:
            done = await waiting
        finally:
            timer.cancel()
            if self._waiting.pop(call.id, None) is not None and self.is_open:
                self._cancels.append(call.id)
                self._wake.set()
        if done.WhichOneof("outcome") == "refusal":
            raise from_status(status_pb2.Status.FromString(done.refusal))
        return done.reply

    async def answered(self, seconds: float) -> None:
        """Waits for the answers that are under way, at most so long."""
        if self._waiting:
            await asyncio.wait(self._waiting.values(), timeout=seconds)

    async def run(self) -> None:
        """Connects, passes calls on until the session breaks, starts again; ends where a processor has no sessions."""
        while True:
            await self._channel.channel_ready()
            loss: Exception = errors.Unavailable("the processor is gone", code="processor_unavailable")
            try:
                await self._run_session(self._stub.PrepareSession())
                problem = "it ended the session"
            except grpc.aio.AioRpcError as failure:
                if failure.code() is grpc.StatusCode.UNIMPLEMENTED:
                    loss = NoSessions()
                    return
                problem = failure.details() or failure.code().name
            except Impostor as stranger:
                problem = str(stranger)
            finally:
                self._lose(loss)
            structlog.get_logger().debug("session with a processor lost", address=self._address, problem=problem)
            await asyncio.sleep(RECONNECT_SECONDS)

    async def _run_session(self, call: grpc.aio.StreamStreamCall[PrepareFrame, PreparedFrame]) -> None:
        writer = asyncio.create_task(self._write(call))
        try:
            # A processor says at once that it has sessions; a call that has ended raises why.
            await self._channel.proven(call)
            await call.initial_metadata()
            await call.wait_for_connection()
            self.is_open = True
            self._on_open()
            # The end of the stream is read as a value that is no frame.
            while isinstance(frame := await call.read(), PreparedFrame):
                for done in frame.calls:
                    if (waiting := self._waiting.pop(done.id, None)) is not None and not waiting.done():
                        waiting.set_result(done)
        finally:
            self.is_open = False
            call.cancel()
            await end(writer)

    async def _write(self, call: grpc.aio.StreamStreamCall[PrepareFrame, PreparedFrame]) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._calls or self._cancels:
                await call.write(self._next_frame())

    def _next_frame(self) -> PrepareFrame:
        """The calls that are waited for, as many as fit."""
        calls = [call for call in self._calls if call.id in self._waiting]
        count, num_bytes = len(calls), 0
        if count > 1:
            for i, call in enumerate(calls):
                if (num_bytes := num_bytes + call.ByteSize()) > MAX_FRAME_BYTES:
                    # The first one always fits.
                    count = i
                    break
        frame = PrepareFrame(calls=calls[:count], cancels=self._cancels)
        self._calls, self._cancels = calls[count:], []
        return frame

    def _lose(self, loss: Exception) -> None:
        waiting, self._waiting = self._waiting, {}
        self._calls.clear()
        self._cancels.clear()
        for each in waiting.values():
            if not each.done():
                each.set_exception(loss)


def _give_up(waiting: Waiting) -> None:
    if not waiting.done():
        waiting.set_exception(errors.Unavailable("the processor does not answer", code="processor_unavailable"))
