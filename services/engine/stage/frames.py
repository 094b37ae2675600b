"""One step's output as frames of one session, in columns, none above the limit. Knows no stream's
state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from headwater.engine_core.request import TokenLogprobs
from headwater.engine_core.step_output import StepOutput
from headwater.proto.common_pb2 import Embedding
from headwater.proto.engine_pb2 import EngineFrame, Finish, LogprobColumns, PromptLogprobs, Start

EventT = TypeVar("EventT", Start, Finish)

MAX_FRAME_BYTES = 256 << 10
# The most that protobuf takes for one value of a column.
_VARINT = 5
_FLOAT = 4
_ROW = 3 * _VARINT
_TOKEN = _VARINT
_ENTRY = 2 * _VARINT + _FLOAT
_ALTERNATIVE = _VARINT + _FLOAT
_HEADERS = 256
"""Tags and lengths of a frame's columns."""
# Together less than half of a frame.
_STARTS_PER_FRAME = 1024
_FINISHES_PER_FRAME = 64
MAX_ERROR_CHARS = 350
"""Characters of a finish's error, of at most four bytes each."""


@dataclass(slots=True)
class Rows:
    """The token rows of one session: the columns of a StepOutput, with stream ids instead of
    keys."""

    stream_ids: list[int] = field(default_factory=list)
    first_index: list[int] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)

    @classmethod
    def of(cls, output: StepOutput, stream_ids: Mapping[int, int]) -> Rows:
        """The rows whose keys are in `stream_ids`; the output's own columns when all are."""
        ids = [stream_ids.get(key, -1) for key in output.keys]
        rows = cls(ids, output.first_index, output.num_tokens, output.token_ids, output.logprobs)
        return (
            rows
            if -1 not in ids
            else rows.chosen([i for i, stream_id in enumerate(ids) if stream_id != -1])
        )

    def chosen(self, indices: Sequence[int]) -> Rows:
        chosen = Rows()
        starts = []
        start = 0
        for count in self.num_tokens:
            starts.append(start)
            start += count
        for i in indices:
            chosen.stream_ids.append(self.stream_ids[i])
            chosen.first_index.append(self.first_index[i])
            chosen.num_tokens.append(self.num_tokens[i])
            for position in range(starts[i], starts[i] + self.num_tokens[i]):
                if position in self.logprobs:
                    chosen.logprobs[len(chosen.token_ids)] = self.logprobs[position]
                chosen.token_ids.append(self.token_ids[position])
        return chosen

    def within(self, limit: int) -> Iterator[Rows]:
        """The same rows in several frames whose encoding is at most `limit` bytes each; a single
        row is not split."""
        if len(self.stream_ids) <= 1 or self._most_bytes() <= limit:
            yield self
            return
        middle = len(self.stream_ids) // 2
        yield from self.chosen(range(middle)).within(limit)
        yield from self.chosen(range(middle, len(self.stream_ids))).within(limit)

    def _most_bytes(self) -> int:
        most = _HEADERS + _ROW * len(self.stream_ids) + _TOKEN * len(self.token_ids)
        return most + sum(
            _ENTRY + _ALTERNATIVE * len(entry.top_ids) for entry in self.logprobs.values()
        )


def step_frames(
    step: int, rows: Rows, starts: Sequence[Start], finishes: Sequence[Finish]
) -> list[EngineFrame]:
    """Frames of a step for one session: usually one, several where it would be too large, none when
    there is nothing to send."""
    frames = (
        [_token_frame(step, part) for part in rows.within(MAX_FRAME_BYTES // 2)]
        if rows.stream_ids
        else []
    )
    if not frames and (starts or finishes):
        frames.append(EngineFrame(step=step))
    if starts:
        *before, joined = _chunks(starts, _STARTS_PER_FRAME)
        frames[0].starts.extend(joined)
        frames[:0] = [EngineFrame(step=step, starts=chunk) for chunk in before]
    if finishes:
        ended, *after = _chunks(finishes, _FINISHES_PER_FRAME)
        frames[-1].finishes.extend(ended)
        frames += [EngineFrame(step=step, finishes=chunk) for chunk in after]
    return frames


def prompt_logprob_frames(
    step: int,
    stream_id: int,
    first_position: int,
    token_ids: Sequence[int],
    entries: Sequence[TokenLogprobs],
    last: bool,
) -> Iterator[EngineFrame]:
    """Chunks of a prompt's log probabilities, each in a frame of its own; `token_ids` are the
    scored ones."""
    num_top = len(entries[0].top_ids) if entries else 0
    size = (MAX_FRAME_BYTES - _HEADERS) // (_ENTRY + num_top * _ALTERNATIVE)
    for start in range(0, max(len(entries), 1), size):
        end = min(start + size, len(entries))
        chunk = PromptLogprobs(
            stream_id=stream_id,
            first_position=first_position + start,
            token_ids=token_ids[start:end],
            logprobs=[entry.logprob for entry in entries[start:end]],
            num_top=num_top,
            last=last and end == len(entries),
        )
        for entry in entries[start:end]:
            chunk.top_ids.extend(entry.top_ids)
            chunk.top_logprobs.extend(entry.top_logprobs)
        yield EngineFrame(step=step, prompt_logprobs=[chunk])


def embedding_frame(step: int, stream_id: int, values: bytes) -> EngineFrame:
    """A vector, float32; a frame of its own, since it is tens of kilobytes."""
    embedding = Embedding(stream_id=stream_id, values=np.frombuffer(values, np.float32).tolist())
    return EngineFrame(step=step, embeddings=[embedding])


def _token_frame(step: int, rows: Rows) -> EngineFrame:
    return EngineFrame(
        step=step,
        stream_ids=rows.stream_ids,
        first_index=rows.first_index,
        num_tokens=rows.num_tokens,
        token_ids=rows.token_ids,
        logprobs=_logprob_columns(rows.logprobs) if rows.logprobs else None,
    )


def _logprob_columns(logprobs: Mapping[int, TokenLogprobs]) -> LogprobColumns:
    columns = LogprobColumns(
        token_indices=logprobs, logprobs=[entry.logprob for entry in logprobs.values()]
    )
    for entry in logprobs.values():
        columns.num_top.append(len(entry.top_ids))
        columns.top_ids.extend(entry.top_ids)
        columns.top_logprobs.extend(entry.top_logprobs)
    return columns


def _chunks(items: Sequence[EventT], size: int) -> list[Sequence[EventT]]:
    return [items[start : start + size] for start in range(0, len(items), size)]
