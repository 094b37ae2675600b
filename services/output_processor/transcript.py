"""The output of a request's choices, in order, so that it can be emitted again. Knows no reader."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headwater.proto.engine_pb2 import Start
from headwater.proto.output_processor_pb2 import OutputFinish, RowLogprobs, RowParts

from .frames import Outbox

_ROW_BYTES = 240
_TOKEN_BYTES = 36
"""Estimated bytes in Python's memory of a row, and of a token."""


@dataclass(slots=True)
class _Row:
    choice: int
    first: int
    token_ids: Sequence[int]
    text: str
    offset: int
    num_bytes: int
    logprobs: bytes | None = None
    parts: bytes | None = None

    @property
    def size(self) -> int:
        extras = len(self.logprobs or b"") + len(self.parts or b"")
        return _ROW_BYTES + _TOKEN_BYTES * len(self.token_ids) + self.num_bytes + extras

    def is_within(self, num_tokens: int, num_bytes: int) -> bool:
        """Whether the row lies among the first tokens and bytes of its choice."""
        end = self.first + len(self.token_ids)
        return end <= num_tokens and (
            bool(self.token_ids) or self.first < num_tokens or self.offset < num_bytes
        )

    def emit(self, outbox: Outbox, stream_id: int) -> None:
        outbox.add_row(
            stream_id, self.first, self.token_ids, self.text, self.offset, self.num_bytes
        )
        if self.logprobs is not None:
            outbox.add_logprobs(RowLogprobs.FromString(self.logprobs).tokens)
        if self.parts is not None:
            outbox.add_parts(RowParts.FromString(self.parts))


@dataclass(slots=True)
class _Start:
    choice: int
    start: Start
    size: int = _ROW_BYTES

    def is_within(self, num_tokens: int, num_bytes: int) -> bool:
        return num_tokens > 0

    def emit(self, outbox: Outbox, stream_id: int) -> None:
        emit_start(outbox, stream_id, self.start)


@dataclass(slots=True)
class _Finish:
    choice: int
    finish: OutputFinish
    size: int = _ROW_BYTES

    def is_within(self, num_tokens: int, num_bytes: int) -> bool:
        return False

    def emit(self, outbox: Outbox, stream_id: int) -> None:
        emit_finish(outbox, stream_id, self.finish)


class Transcript:
    """Output by choice index. `num_tokens` and `ended` stay right when the entries are no longer
    kept."""

    def __init__(self, num_choices: int) -> None:
        self.num_tokens = [0] * num_choices
        self.ended = [False] * num_choices
        self.num_bytes = 0
        """Estimated bytes of the entries in memory."""
        self._entries: list[_Row | _Start | _Finish] = []
        self._is_kept = True

    def add_row(
        self,
        choice: int,
        first: int,
        token_ids: Sequence[int],
        text: str,
        offset: int,
        num_bytes: int,
    ) -> None:
        self.num_tokens[choice] = first + len(token_ids)
        self._keep(_Row(choice, first, token_ids, text, offset, num_bytes))

    def add_logprobs(self, logprobs: RowLogprobs) -> None:
        """Adds log probabilities to the row that was added last."""
        if (row := self._last_row()) is not None:
            row.logprobs = logprobs.SerializeToString()
            self.num_bytes += len(row.logprobs)

    def add_parts(self, parts: RowParts) -> None:
        """Adds parts to the row that was added last."""
        if (row := self._last_row()) is not None:
            row.parts = parts.SerializeToString()
            self.num_bytes += len(row.parts)

    def add_start(self, choice: int, start: Start) -> None:
        kept = Start()
        kept.CopyFrom(start)
        self._keep(_Start(choice, kept))

    def add_finish(self, choice: int, finish: OutputFinish) -> None:
        self.ended[choice] = True
        self._keep(_Finish(choice, finish))

    def cut(self, choice: int, num_tokens: int, num_bytes: int) -> None:
        """Removes the output of a choice past its first tokens and bytes."""
        self.ended[choice] = False
        self.num_tokens[choice] = num_tokens
        self._entries = [
            each
            for each in self._entries
            if each.choice != choice or each.is_within(num_tokens, num_bytes)
        ]
        self.num_bytes = sum(each.size for each in self._entries)

    def emit(self, outbox: Outbox, stream_ids: Sequence[int]) -> None:
        """Emits all output again; `stream_ids` are by choice."""
        for entry in self._entries:
            entry.emit(outbox, stream_ids[entry.choice])

    def drop(self) -> None:
        """Keeps no entries from now on."""
        self._is_kept = False
        self._entries.clear()
        self.num_bytes = 0

    def _keep(self, entry: _Row | _Start | _Finish) -> None:
        if self._is_kept:
            self._entries.append(entry)
            self.num_bytes += entry.size

    def _last_row(self) -> _Row | None:
        last = self._entries[-1] if self._entries else None
        return last if isinstance(last, _Row) else None


def emit_start(outbox: Outbox, stream_id: int, start: Start) -> None:
    emitted = Start()
    emitted.CopyFrom(start)
    emitted.stream_id = stream_id
    outbox.add_start(emitted)


def emit_finish(outbox: Outbox, stream_id: int, finish: OutputFinish) -> None:
    emitted = OutputFinish()
    emitted.CopyFrom(finish)
    emitted.stream_id = stream_id
    outbox.add_finish(emitted)
    # Output of other choices from now on comes after the finish, as it does in the transcript.
    outbox.seal()
