"""The lane of long chunks that are not urgent, beside a session's frames of tokens. Knows no
stream's state."""

from __future__ import annotations

from collections import Counter, deque
from typing import Generic, TypeVar

ChunkT = TypeVar("ChunkT")
FinishT = TypeVar("FinishT")


class ChunkLane(Generic[ChunkT, FinishT]):
    """Chunks of prompts' log probabilities, at most one between two frames.

    A stream's finish waits for the last of its chunks.
    """

    def __init__(self) -> None:
        self._chunks: deque[tuple[int, ChunkT]] = deque()
        self._num_chunks: Counter[int] = Counter()
        """Number of waiting chunks, by stream."""
        self._held: dict[int, FinishT] = {}
        """Finishes that wait for their stream's chunks."""
        self._went_last = True

    def __bool__(self) -> bool:
        return bool(self._chunks)

    def put(self, stream_id: int, chunk: ChunkT) -> None:
        self._chunks.append((stream_id, chunk))
        self._num_chunks[stream_id] += 1

    def holds(self, stream_id: int, finish: FinishT) -> bool:
        """Whether the stream has unsent chunks. Its finish is kept then and follows the last
        chunk."""
        if stream_id not in self._num_chunks:
            return False
        self._held[stream_id] = finish
        return True

    def is_next(self, others_wait: bool) -> bool:
        """Whether a chunk goes next, given whether frames wait; asked once for each frame that is
        sent."""
        self._went_last = bool(self._chunks) and not (others_wait and self._went_last)
        return self._went_last

    def take(self) -> tuple[ChunkT, FinishT | None]:
        """The next chunk, and the finish of its stream if it is the last one."""
        stream_id, chunk = self._chunks.popleft()
        self._num_chunks[stream_id] -= 1
        if self._num_chunks[stream_id]:
            return chunk, None
        del self._num_chunks[stream_id]
        return chunk, self._held.pop(stream_id, None)
