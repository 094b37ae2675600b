"""One gateway's stream of requests to prepare: each is answered as soon as it is ready, together with what else is.

Reading never waits for writing. Knows nothing about what preparing is.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

from google.rpc import status_pb2

from headwater.proto.processor_pb2 import PrepareCall, PreparedCall, PreparedFrame, PrepareFrame, PrepareReply

from ..runtime.grpc_errors import reply_or_refusal
from ..runtime.tasks import log_failure, owned_task

MAX_FRAME_BYTES = 192 * 1024
"""After which the next answers go in another frame."""


class PrepareSession:
    """`answer` prepares one request, or raises a named error."""

    def __init__(self, answer: Callable[[PrepareCall], Awaitable[PrepareReply]]) -> None:
        self._answer = answer
        self._running: dict[int, asyncio.Task[None]] = {}
        self._ready: list[PreparedCall] = []
        self._changed = asyncio.Event()
        self._is_over = False

    async def run(self, incoming: AsyncIterator[PrepareFrame]) -> AsyncIterator[PreparedFrame]:
        """What the gateway hears, until it leaves or `end`; what it no longer waits for is given up."""
        try:
            async with owned_task(self._read(incoming)) as reading:
                reading.add_done_callback(lambda _: self.end())
                while self._ready or self._running or not self._is_over:
                    await self._changed.wait()
                    self._changed.clear()
                    while self._ready:
                        yield self._frame()
        finally:
            for task in self._running.values():
                task.cancel()

    def end(self) -> None:
        """Ends the session after what runs."""
        self._is_over = True
        self._changed.set()

    async def _read(self, incoming: AsyncIterator[PrepareFrame]) -> None:
        async for frame in incoming:
            for call in frame.calls:
                task = self._running[call.id] = asyncio.create_task(self._run(call))
                task.add_done_callback(log_failure)
            for call_id in frame.cancels:
                if (running := self._running.pop(call_id, None)) is not None:
                    running.cancel()
                    self._changed.set()

    async def _run(self, call: PrepareCall) -> None:
        outcome = await reply_or_refusal(self._answer(call), "PrepareSession")
        if isinstance(outcome, status_pb2.Status):
            done = PreparedCall(id=call.id, refusal=outcome.SerializeToString())
        else:
            done = PreparedCall(id=call.id, reply=outcome)
        self._running.pop(call.id, None)
        self._ready.append(done)
        self._changed.set()

    def _frame(self) -> PreparedFrame:
        """What is ready, as much as fits; an answer that is longer than that goes alone."""
        count, num_bytes = len(self._ready), 0
        if count > 1:
            for i, done in enumerate(self._ready):
                if (num_bytes := num_bytes + done.ByteSize()) > MAX_FRAME_BYTES:
                    count = max(i, 1)
                    break
        frame = PreparedFrame(calls=self._ready[:count])
        del self._ready[:count]
        return frame
