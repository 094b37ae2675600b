"""Reads JSON that clients send, within limits and in native calls of bounded length.

A native decoder lets no other thread run until it returns. Long JSON is therefore cut at commas
into pieces that are decoded one by one; a piece is longer only where it holds one long string.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import msgspec

from .json_limits import MAX_VALUES, SLICE_BYTES, STRING, behind_string, check_json

PIECE_BYTES = 64 * 1024
"""Most bytes of a piece that a comma ends."""
WHOLE_BYTES = 256 * 1024
"""JSON up to this size is decoded at once: it takes 5 ms at most."""
_STRUCTURE = re.compile(rb'["\[\]{}]')
_MATCHED_LEVELS = 5
"""Levels of an object or list that one native step passes over. A message with tool calls has
four."""
_BLANK = b" \t\r\n"


def _nested(levels: int) -> bytes:
    """Expression of an object or list of valid JSON with at most so many levels."""
    inner = STRING.pattern if levels == 1 else rb"(?:%b|%b)" % (STRING.pattern, _nested(levels - 1))
    return rb'[\[{][^"\[\]{}]*+(?:%b[^"\[\]{}]*+)*+[\]}]' % inner


_CONTAINER = re.compile(_nested(_MATCHED_LEVELS), re.DOTALL)


def read_json(text: str | bytes, param: str | None = None, *, max_values: int = MAX_VALUES) -> Any:
    """Value of a client's JSON. `param` is the field that holds it, None for a whole body. Raises
    `BadRequest` for JSON that exceeds a limit, `msgspec.MsgspecError` or `UnicodeError` for text
    that is no JSON."""
    data = text.encode() if isinstance(text, str) else text
    check_json(data, param, max_values=max_values)
    return msgspec.json.decode(data) if len(data) <= WHOLE_BYTES else read_in_pieces(data)


def read_in_pieces(text: bytes, piece_bytes: int = PIECE_BYTES) -> Any:
    """Like `msgspec.json.decode`, in pieces; other threads may run after each piece."""
    # This pass makes no values and takes 3 ms for 4 MB. The reader relies on valid JSON.
    msgspec.json.decode(text, type=msgspec.Raw)
    return _PieceReader(text, piece_bytes).read()


@dataclass(slots=True)
class _Open:
    """An object or list whose end is not reached."""

    start: int
    """Offset of its bracket."""
    begin: int
    """Offset from which on its text is not decoded yet."""
    comma: int
    """Offset of the last comma of the open object or list, or of its bracket before the first
    comma."""
    values: Any
    """The decoded part of it: a list, or a dict."""
    is_cut: bool = False
    """Whether a part of it is in `values` already."""


class _PieceReader:
    """Reads one text of valid JSON."""

    def __init__(self, text: bytes, piece_bytes: int) -> None:
        self._text = text
        self._piece_bytes = piece_bytes
        self._open: list[_Open] = []

    def read(self) -> Any:
        text = self._text
        # The text from `run` to `at` has no bracket and no string, so that its commas belong to
        # the innermost object or list.
        run = at = 0
        while at < len(text):
            found = _STRUCTURE.search(text, at, at + SLICE_BYTES)
            if found is None:
                at += SLICE_BYTES
                continue
            at = found.start()
            if self._open:
                self._pass_commas(self._open[-1], run, at)
            match text[at : at + 1]:
                case b'"':
                    string = STRING.match(text, at, at + SLICE_BYTES)
                    at = string.end() if string else behind_string(text, at + 1)
                case b"[" | b"{" if self._open and (
                    short := _CONTAINER.match(text, at, at + self._piece_bytes)
                ):
                    # The value is decoded together with its surroundings.
                    at = short.end()
                case b"[" | b"{" as bracket:
                    values: Any = [] if bracket == b"[" else {}
                    self._open.append(_Open(at, at + 1, at, values))
                    at += 1
                case _:
                    at += 1
                    if self._close(at):
                        return self._value
            run = at
        # The value is a string or a number.
        return msgspec.json.decode(text)

    def _pass_commas(self, inner: _Open, run: int, end: int) -> None:
        """Decodes what stands before commas, where it is long enough for a piece."""
        find = self._text.rfind
        while end - inner.begin > self._piece_bytes:
            since = max(run, inner.begin)
            cut = find(b",", since, inner.begin + self._piece_bytes)
            if cut < 0:
                cut = self._text.find(b",", since, end)
            if cut < 0:
                break
            self._decode(inner, cut)
            inner.comma = cut
        inner.comma = max(inner.comma, find(b",", run, end))

    def _close(self, end: int) -> bool:
        """Ends the innermost object or list at its closing bracket. Returns whether it is the whole
        text, whose value is then `_value`."""
        closed = self._open.pop()
        if self._open and not closed.is_cut and end - closed.start <= self._piece_bytes:
            # The value is decoded together with its surroundings.
            return False
        self._decode(closed, end - 1)
        self._value = closed.values
        if not self._open:
            return True
        outer = self._open[-1]
        self._decode(outer, outer.comma)
        if isinstance(outer.values, list):
            outer.values.append(closed.values)
        else:
            name = self._text[outer.comma + 1 : closed.start].strip(_BLANK).removesuffix(b":")
            outer.values[msgspec.json.decode(name)] = closed.values
        outer.is_cut = True
        outer.begin = end
        return False

    def _decode(self, inner: _Open, end: int) -> None:
        """Decodes an object or list up to an offset."""
        # After a part that was decoded earlier there is a comma.
        part = self._text[inner.begin : end].strip(_BLANK).removeprefix(b",")
        if part.strip(_BLANK):
            if isinstance(inner.values, list):
                inner.values += msgspec.json.decode(b"[%b]" % part)
            else:
                inner.values.update(msgspec.json.decode(b"{%b}" % part))
        inner.is_cut = True
        inner.begin = end + 1
