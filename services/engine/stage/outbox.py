"""Frames that a session has still to send: tokens in order, prompt chunks between them. Knows no
stream's state.

Bounded by the credit of the streams and the length of the prompts, not by a number of frames: a
slow connection makes frames wait here, then credits run out, then the engine skips the streams.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from headwater.proto.engine_pb2 import EngineFrame, Finish

from ...runtime.session.chunk_lane import ChunkLane


class Outbox:
    def __init__(self) -> None:
        self.on_filled: Callable[[], None] = lambda: None
        """Called when there is something more to send."""
        self._frames: deque[EngineFrame] = deque()
        self._chunks: ChunkLane[EngineFrame, Finish] = ChunkLane()

    def put(self, frames: Iterable[EngineFrame]) -> None:
        self._frames.extend(frames)
        self.on_filled()

    def put_chunk(self, frame: EngineFrame) -> None:
        """A frame that holds one chunk of a prompt's log probabilities and gives way to token
        frames."""
        self._chunks.put(frame.prompt_logprobs[0].stream_id, frame)
        self.on_filled()

    def holds(self, finish: Finish) -> bool:
        """Whether the stream has unsent chunks. Its finish is kept then and follows the last
        chunk."""
        return self._chunks.holds(finish.stream_id, finish)

    def next_frame(self) -> EngineFrame | None:
        """Takes the next frame out; at most one chunk between two token frames."""
        if self._chunks.is_next(bool(self._frames)):
            frame, finish = self._chunks.take()
            if finish is not None:
                self._frames.append(EngineFrame(step=frame.step, finishes=[finish]))
            return frame
        return self._frames.popleft() if self._frames else None
