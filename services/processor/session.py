"""One gateway's stream of requests to prepare: each is answered as soon as it is ready, together
with what else is.

Reading never waits for writing. Knows nothing about what preparing is.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

from google.rpc import status_pb2

from headwater.proto.processor_pb2 import (
    PrepareCall,
    PreparedCall,
    PreparedFrame,
    PrepareFrame,
    PrepareReply,
)

from ..runtime.grpc_errors import reply_or_refusal
from ..runtime.session.answering import AnsweringEnd
from ..runtime.session.joined import num_joined
from ..runtime.tasks import log_failure

MAX_FRAME_BYTES = 192 * 1024
"""Number of bytes of a frame after which the next answers go into another one."""


class PrepareSession:
    """`answer` prepares one request, or raises a named error."""

    def __init__(self, answer: Callable[[PrepareCall], Awaitable[PrepareReply]]) -> None:
        self._answer = answer
        self._running: dict[int, asyncio.Task[None]] = {}
        self._ready: list[PreparedCall] = []
        self._is_over = False
        self._end = AnsweringEnd(self._next_frame, self._take, lambda _: self.end())

    async def run(self, incoming: AsyncIterator[PrepareFrame]) -> AsyncIterator[PreparedFrame]:
        """Yields frames for the gateway, until it leaves or `end`; then cancels the calls that
        still run."""
        try:
            async with contextlib.aclosing(self._end.run(incoming)) as frames:
                async for frame in frames:
                    yield frame
        finally:
            for task in self._running.values():
                task.cancel()

    @property
    def num_running(self) -> int:
        """Requests that are not answered yet."""
        return len(self._running)

    def end(self) -> None:
        """Ends the session after what runs."""
        self._is_over = True
        self._close_if_done()

    def _close_if_done(self) -> None:
        if self._is_over and not self._running:
            self._end.close()

    def _take(self, frame: PrepareFrame) -> None:
        for call in frame.calls:
            task = self._running[call.id] = asyncio.create_task(self._run(call))
            task.add_done_callback(log_failure)
        for call_id in frame.cancels:
            if (running := self._running.pop(call_id, None)) is not None:
                running.cancel()
        self._close_if_done()

    async def _run(self, call: PrepareCall) -> None:
        outcome = await reply_or_refusal(self._answer(call), "PrepareSession")
        if isinstance(outcome, status_pb2.Status):
            done = PreparedCall(id=call.id, refusal=outcome.SerializeToString())
        else:
            done = PreparedCall(id=call.id, reply=outcome)
        self._running.pop(call.id, None)
        self._ready.append(done)
        self._end.wake()
        self._close_if_done()

    def _next_frame(self) -> PreparedFrame | None:
        """Answers that are ready, as many as fit a frame; one longer than that goes alone. None:
        none is ready."""
        if not self._ready:
            return None
        count = num_joined(self._ready, MAX_FRAME_BYTES)
        frame = PreparedFrame(calls=self._ready[:count])
        del self._ready[:count]
        return frame
