"""What a session has still to send: token frames in order, prompt chunks between them. Knows no stream's state.

Bounded by the credit of the streams and the length of the prompts, not by a number of frames: a slow connection makes
frames wait here, then credits run out, then the engine skips the streams.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Iterable

from headwater.proto.engine_pb2 import EngineFrame, Finish


class Outbox:
    def __init__(self) -> None:
        self._frames: deque[EngineFrame] = deque()
        self._chunks: deque[EngineFrame] = deque()
        self._num_chunks: Counter[int] = Counter()
        """Of each stream that has any."""
        self._held: dict[int, Finish] = {}
        self._changed = asyncio.Event()
        self._is_closed = False

    def put(self, frames: Iterable[EngineFrame]) -> None:
        self._frames.extend(frames)
        self._changed.set()

    def put_chunk(self, frame: EngineFrame) -> None:
        """A frame that holds one chunk of a prompt's log probabilities and gives way to token frames."""
        self._chunks.append(frame)
        self._num_chunks[frame.prompt_logprobs[0].stream_id] += 1
        self._changed.set()

    def holds(self, finish: Finish) -> bool:
        """Whether the stream has chunks to send; then its finish is kept and follows the last of them."""
        if finish.stream_id not in self._num_chunks:
            return False
        self._held[finish.stream_id] = finish
        return True

    def close(self) -> None:
        """`sent` ends after what is queued."""
        self._is_closed = True
        self._changed.set()

    async def sent(self) -> AsyncIterator[EngineFrame]:
        """What is to be sent, as it comes; at most one chunk between two token frames."""
        while self._frames or self._chunks or not self._is_closed:
            if self._frames:
                yield self._frames.popleft()
            if self._chunks:
                yield self._next_chunk()
            elif not self._frames and not self._is_closed:
                self._changed.clear()
                await self._changed.wait()

    def _next_chunk(self) -> EngineFrame:
        frame = self._chunks.popleft()
        stream_id = frame.prompt_logprobs[0].stream_id
        self._num_chunks[stream_id] -= 1
        if not self._num_chunks[stream_id]:
            del self._num_chunks[stream_id]
            if (finish := self._held.pop(stream_id, None)) is not None:
                self._frames.append(EngineFrame(step=frame.step, finishes=[finish]))
        return frame
