"""The stream of requests to one processor: a frame takes all that wait, where a call of its own
would cost each of them more than being prepared does.

Knows nothing about which processor is asked, nor what becomes of a request whose session is lost.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable

import grpc
from google.rpc import status_pb2

from headwater.proto import processor_pb2_grpc
from headwater.proto.processor_pb2 import (
    PrepareCall,
    PreparedCall,
    PreparedFrame,
    PrepareFrame,
    PrepareReply,
)
from headwater.services.runtime import errors
from headwater.services.runtime.call_proof import StageChannel
from headwater.services.runtime.grpc_errors import from_status
from headwater.services.runtime.session.calling import CallingEnd, Cause, Ending, keep_up
from headwater.services.runtime.session.joined import num_joined

MAX_CALL_BYTES = 64 * 1024
"""Requests larger than this have a call of their own, whose overhead is small in comparison, so
that other requests need not wait for them."""
MAX_FRAME_BYTES = 192 * 1024
Waiting = asyncio.Future[PreparedCall]
SessionCall = grpc.aio.StreamStreamCall[PrepareFrame, PreparedFrame]


class NoSessions(Exception):
    """The processor serves single calls only, which was not known yet."""


class PrepareSession:
    """Session that `run` maintains; `prepare` may be called while it `is_open`."""

    def __init__(
        self,
        address: str,
        channel: StageChannel,
        stub: processor_pb2_grpc.ProcessorAsyncStub,
        *,
        on_open: Callable[[], None],
    ) -> None:
        self.is_open = False
        self._address = address
        self._channel = channel
        self._stub = stub
        self._on_open = on_open
        self._ids = itertools.count(1)
        self._waiting: dict[int, Waiting] = {}
        """Futures of the answers, by call."""
        self._calls: list[PrepareCall] = []
        self._cancels: list[int] = []
        self._end = CallingEnd(self._next_frame, self._on_frame)

    async def prepare(self, call: PrepareCall, seconds: float) -> PrepareReply:
        """Raises the named error of the stage, `Unavailable` when the session is lost meanwhile,
        `NoSessions`."""
        call.id = next(self._ids)
        loop = asyncio.get_running_loop()
        waiting: Waiting = loop.create_future()
        self._waiting[call.id] = waiting
        self._calls.append(call)
        self._end.wake()
        timer = loop.call_later(seconds, _give_up, waiting)
        try:
            done = await waiting
        finally:
            timer.cancel()
            if self._waiting.pop(call.id, None) is not None and self.is_open:
                self._cancels.append(call.id)
                self._end.wake()
        if done.WhichOneof("outcome") == "refusal":
            raise from_status(status_pb2.Status.FromString(done.refusal))
        return done.reply

    async def answered(self, seconds: float) -> None:
        """Waits for pending answers, at most `seconds`."""
        if self._waiting:
            await asyncio.wait(self._waiting.values(), timeout=seconds)

    async def run(self) -> None:
        """Connects, passes calls on until the session breaks, starts again; ends where a processor
        has no sessions."""
        await keep_up(
            self._run_session,
            "session with a processor",
            self._address,
            is_over=lambda end: end.cause is Cause.UNSERVED,
        )

    async def _run_session(self) -> Ending:
        loss: Exception = errors.Unavailable("the processor is gone", code="processor_unavailable")
        try:
            await self._channel.channel_ready()
            call = self._stub.PrepareSession()
            ending = await self._end.run(self._channel, call, lambda: self._on_proven(call))
            if ending.cause is Cause.UNSERVED:
                loss = NoSessions()
            return ending
        finally:
            self.is_open = False
            self._lose(loss)

    async def _on_proven(self, call: SessionCall) -> None:
        # A processor sends its metadata at once if it serves sessions; a call that has ended raises
        # its error.
        await call.initial_metadata()
        await call.wait_for_connection()
        self.is_open = True
        self._on_open()

    def _on_frame(self, frame: PreparedFrame) -> None:
        for done in frame.calls:
            if (waiting := self._waiting.pop(done.id, None)) is not None and not waiting.done():
                waiting.set_result(done)

    def _next_frame(self) -> PrepareFrame | None:
        """The calls that are waited for, as many as fit."""
        calls = [call for call in self._calls if call.id in self._waiting]
        if not (calls or self._cancels):
            self._calls.clear()
            return None
        count = num_joined(calls, MAX_FRAME_BYTES)
        frame = PrepareFrame(calls=calls[:count], cancels=self._cancels)
        self._calls = calls[count:]
        self._cancels = []
        return frame

    def _lose(self, loss: Exception) -> None:
        waiting = self._waiting
        self._waiting = {}
        self._calls.clear()
        self._cancels.clear()
        for each in waiting.values():
            if not each.done():
                each.set_exception(loss)


def _give_up(waiting: Waiting) -> None:
    if not waiting.done():
        waiting.set_exception(
            errors.Unavailable("the processor does not answer", code="processor_unavailable")
        )
