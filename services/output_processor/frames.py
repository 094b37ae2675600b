"""Output that waits for one gateway, as columns of frames below the size limit. Knows no stream's
state.

While the gateway reads slowly, new output joins the frame that waits; credit bounds how much that
can be.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from headwater.proto.common_pb2 import Embedding, TokenLogprob
from headwater.proto.engine_pb2 import Start
from headwater.proto.output_processor_pb2 import (
    Attached,
    OutputFinish,
    OutputFrame,
    OutputPromptLogprobs,
    RowLogprobs,
    RowParts,
)

from ..runtime.session.chunk_lane import ChunkLane

FULL_FRAME_BYTES = 192 * 1024
"""A frame takes nothing more from this size on; no item is larger than the rest of the 256 KiB that
it may have."""
_FINISHES_BYTES = 48 * 1024
"""Room in a frame beyond that, for finishes alone."""
_ROW_BYTES = 32
_TOKEN_BYTES = 4
_START_BYTES = 96
"""Most bytes of a row, a token and the start of a choice in a frame's protobuf message."""


@dataclass(slots=True)
class _Columns:
    """A frame in the making."""

    stream_ids: list[int] = field(default_factory=list)
    first_index: list[int] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    text_offset: list[int] = field(default_factory=list)
    logprobs: list[RowLogprobs] = field(default_factory=list)
    parts: list[RowParts] = field(default_factory=list)
    starts: list[Start] = field(default_factory=list)
    attached: list[Attached] = field(default_factory=list)
    embeddings: list[Embedding] = field(default_factory=list)
    finishes: list[OutputFinish] = field(default_factory=list)
    answered: bool = False
    num_bytes: int = 0

    def to_pb(self) -> OutputFrame:
        columns: dict[str, Any] = {name: getattr(self, name) for name in _COLUMNS}
        return OutputFrame(**columns)


_COLUMNS = tuple(each.name for each in fields(_Columns) if each.name != "num_bytes")


class Outbox:
    """Collects rows without waiting and returns frames in order."""

    def __init__(self) -> None:
        self.on_filled: Callable[[], None] = lambda: None
        """Called when there is something more to send."""
        self._frames: deque[_Columns] = deque()
        self._parts: ChunkLane[OutputPromptLogprobs, OutputFinish] = ChunkLane()
        self._is_sealed = False
        """The last frame takes nothing more."""

    def add_row(
        self,
        stream_id: int,
        first: int,
        token_ids: Sequence[int],
        text: str,
        offset: int,
        num_bytes: int,
    ) -> None:
        """Tokens of a stream and the text that they make certain; `num_bytes` is the text's length
        in UTF-8."""
        columns = self._open_columns()
        columns.stream_ids.append(stream_id)
        columns.first_index.append(first)
        columns.num_tokens.append(len(token_ids))
        columns.token_ids += token_ids
        columns.texts.append(text)
        columns.text_offset.append(offset)
        columns.num_bytes += _ROW_BYTES + _TOKEN_BYTES * len(token_ids) + num_bytes

    def add_logprobs(self, tokens: Iterable[TokenLogprob]) -> None:
        """Adds log probabilities to the row that was added last."""
        columns = self._frames[-1]
        row = RowLogprobs(row=len(columns.stream_ids) - 1, tokens=tokens)
        columns.logprobs.append(row)
        columns.num_bytes += row.ByteSize() + _ROW_BYTES

    def add_parts(self, parts: RowParts) -> None:
        """Adds parts to the row that was added last."""
        columns = self._frames[-1]
        parts.row = len(columns.stream_ids) - 1
        columns.parts.append(parts)
        columns.num_bytes += parts.ByteSize()

    def add_attached(self, attached: Attached) -> None:
        columns = self._open_columns()
        columns.attached.append(attached)
        columns.num_bytes += attached.ByteSize() + _ROW_BYTES

    def answer(self) -> None:
        """Answers a probe in the next frame."""
        self._open_columns().answered = True

    def seal(self) -> None:
        """Later output goes into another frame: a gateway reads the rows of a frame ahead of its
        finishes."""
        self._is_sealed = True

    def add_start(self, start: Start) -> None:
        columns = self._open_columns()
        columns.starts.append(start)
        columns.num_bytes += _START_BYTES

    def add_embedding(self, embedding: Embedding) -> None:
        columns = self._open_columns()
        columns.embeddings.append(embedding)
        columns.num_bytes += embedding.ByteSize() + _ROW_BYTES

    def add_finish(self, finish: OutputFinish) -> None:
        if self._parts.holds(finish.stream_id, finish):
            return
        # In the frame of the row before it, which may be its stream's: last tokens come with the
        # finish or not at all.
        is_room = (
            self._frames
            and not self._is_sealed
            and self._frames[-1].num_bytes < FULL_FRAME_BYTES + _FINISHES_BYTES
        )
        columns = self._frames[-1] if is_room else self._open_columns()
        columns.finishes.append(finish)
        columns.num_bytes += finish.ByteSize() + _ROW_BYTES

    def add_prompt_part(self, part: OutputPromptLogprobs) -> None:
        self._parts.put(part.stream_id, part)
        self.on_filled()

    def next_frame(self) -> OutputFrame | None:
        """Takes the next frame out; at most one part of a prompt's log probabilities between two
        frames of tokens."""
        if self._parts.is_next(bool(self._frames)):
            part, finish = self._parts.take()
            if finish is not None:
                self.add_finish(finish)
            return OutputFrame(prompt_logprobs=[part])
        return self._frames.popleft().to_pb() if self._frames else None

    def _open_columns(self) -> _Columns:
        if self._frames and not self._is_sealed and self._frames[-1].num_bytes < FULL_FRAME_BYTES:
            return self._frames[-1]
        self._frames.append(_Columns())
        self._is_sealed = False
        self.on_filled()
        return self._frames[-1]
