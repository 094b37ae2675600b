"""What was said of a choice, as a log keeps it, and about what that takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headwater.proto.engine_pb2 import Start
from headwater.proto.output_processor_pb2 import OutputFinish

_ROW_BYTES, _TOKEN_BYTES = 240, 36
"""About what Python takes for them."""


@dataclass(slots=True)
class Row:
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
        beside = len(self.logprobs or b"") + len(self.parts or b"")
        return _ROW_BYTES + _TOKEN_BYTES * len(self.token_ids) + self.num_bytes + beside


@dataclass(slots=True)
class Begin:
    choice: int
    start: Start
    size: int = _ROW_BYTES


@dataclass(slots=True)
class End:
    choice: int
    finish: OutputFinish
    size: int = _ROW_BYTES


Entry = Row | Begin | End


def is_within(entry: Entry, num_tokens: int, num_bytes: int) -> bool:
    """It was said among so many tokens and bytes of its choice."""
    if isinstance(entry, Row):
        end = entry.first + len(entry.token_ids)
        return end <= num_tokens and (bool(entry.token_ids) or entry.first < num_tokens or entry.offset < num_bytes)
    return isinstance(entry, Begin) and num_tokens > 0
