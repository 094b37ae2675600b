"""Reads an input file: its lines, or the faults for which it is refused. Pure work on text."""

from __future__ import annotations

from codecs import BOM_UTF8
from collections.abc import Iterator
from typing import IO

import msgspec

from headwater.services.runtime.errors import BadRequest
from headwater.services.runtime.json_limits import check_json

from .records import Fault, Line, LineOptions

MAX_LINES = 50_000
MAX_FAULTS = 100
"""Number of faults that are reported of one file."""
MAX_CUSTOM_ID = 512
_lines = msgspec.json.Decoder(Line)
_options = msgspec.json.Decoder(LineOptions)


def numbered(file: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    """Lines that are not blank, by their number in the file, from 1."""
    file.seek(0)
    for number, text in enumerate(file, 1):
        if text.strip():
            yield number, text


def read_line(text: bytes) -> Line:
    """Reads a line. Raises `msgspec.DecodeError`. Some editors write a byte order mark before the
    first line."""
    text = text.removeprefix(BOM_UTF8)
    try:
        check_json(text, "the line")
    except BadRequest as fault:
        raise msgspec.DecodeError(fault.message) from None
    return _lines.decode(text)


def read_options(line: Line) -> LineOptions:
    """Reads what a batch takes of a line's body. Raises `msgspec.DecodeError` for a body that is no
    object."""
    return _options.decode(line.body)


def check_lines(file: IO[bytes], endpoint: str, max_line_bytes: int) -> tuple[int, list[Fault]]:
    """Number of lines, and their faults."""
    faults: list[Fault] = []
    seen: dict[str, int] = {}
    count = 0
    for number, text in numbered(file):
        count += 1
        if count > MAX_LINES:
            return count, [
                Fault(code="too_many_lines", message=f"the file has more than {MAX_LINES} requests")
            ]
        if (fault := _fault_of(number, text, endpoint, max_line_bytes, seen)) is not None:
            faults.append(fault)
        if len(faults) == MAX_FAULTS:
            break
    if not count:
        faults.append(Fault(code="empty_file", message="the file has no requests"))
    return count, faults


def _fault_of(
    number: int, text: bytes, endpoint: str, max_line_bytes: int, seen: dict[str, int]
) -> Fault | None:
    if len(text) > max_line_bytes:
        return Fault(
            code="line_too_long", message=f"it has more than {max_line_bytes} bytes", line=number
        )
    try:
        line = read_line(text)
        read_options(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as broken:
        return Fault(code="invalid_json_line", message=f"it is no request: {broken}", line=number)
    param = ""
    code = ""
    message = ""
    if line.method != "POST":
        param = "method"
        code = "invalid_method"
        message = "allowed: POST"
    elif line.url != endpoint:
        param = "url"
        code = "mismatched_endpoint"
        message = f"allowed: the batch's, {endpoint}"
    elif not 1 <= len(line.custom_id) <= MAX_CUSTOM_ID:
        param = "custom_id"
        code = "invalid_custom_id"
        message = f"allowed: 1 to {MAX_CUSTOM_ID} characters"
    elif (first := seen.setdefault(line.custom_id, number)) != number:
        param = "custom_id"
        code = "duplicate_custom_id"
        message = f"line {first} has the same"
    return Fault(code=code, message=message, line=number, param=param) if code else None
