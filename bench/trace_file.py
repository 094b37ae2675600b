"""Files of recorded requests, one JSON object a line, read with errors that name the file and the
line.

Knows the record of Mooncake's format; knows nothing about its use.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

Record = TypeVar("Record")
NotNegative = Annotated[int, msgspec.Meta(ge=0)]
NO_REQUESTS = "there are no requests in it"


class TraceError(Exception):
    """A file of recorded requests cannot be used. `line` is 0 where no single line is at fault."""

    def __init__(self, path: Path, problem: str, line: int = 0) -> None:
        super().__init__(f"{path}{f', line {line}' if line else ''}: {problem}")
        self.path = path
        self.problem = problem
        self.line = line


class TraceRecord(msgspec.Struct, frozen=True):
    """A request of Mooncake's format, https://github.com/kvcache-ai/Mooncake."""

    timestamp: Annotated[float, msgspec.Meta(ge=0)]
    """Milliseconds from the start."""
    input_length: Annotated[int, msgspec.Meta(ge=1)]
    output_length: NotNegative
    hash_ids: list[NotNegative]
    """One id for each 512 tokens of the prompt; equal ids mean equal blocks."""


def read_trace(path: Path, limit: int | None = None) -> list[TraceRecord]:
    """The first `limit` requests of a trace in Mooncake's format, at least one. Raises
    `TraceError`."""
    records = [record for _, record in islice(numbered_records(path, TraceRecord), limit)]
    if not records:
        raise TraceError(path, NO_REQUESTS)
    return records


def read_bodies(path: Path) -> list[dict[str, Any]]:
    """The request bodies of a file, at least one, each with `messages` or a `prompt`. Raises
    `TraceError`."""
    bodies = []
    for number, body in numbered_records(path, dict[str, Any]):
        if "messages" not in body and "prompt" not in body:
            raise TraceError(path, "Object missing required field `messages` or `prompt`", number)
        bodies.append(body)
    if not bodies:
        raise TraceError(path, NO_REQUESTS)
    return bodies


def numbered_records(
    path: Path, kind: type[Record], holding: bytes = b""
) -> Iterator[tuple[int, Record]]:
    """(line number, record) of each line that is not blank and has `holding` in it. Raises
    `TraceError`."""
    decoder = msgspec.json.Decoder(kind)
    for number, line in _lines(path):
        if holding in line:
            try:
                yield number, decoder.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise TraceError(path, str(error), number) from None


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, line
    except OSError as error:
        raise TraceError(path, error.strerror or str(error)) from None
