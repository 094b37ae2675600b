"""Parser of calls in the formats of `object_formats`, from text as it comes. Text outside of calls
is content."""

from __future__ import annotations

from .calls import Calls
from .object_formats import ObjectFormat
from .parts import Margin, Parts, PartsParser, split_at


class ObjectParser(PartsParser):
    """Reads calls that are one JSON object each, with text between them."""

    def __init__(self, form: ObjectFormat) -> None:
        super().__init__(self._in_text)
        self._begins = form.begins
        self._end = form.end.strip()
        self._stop = form.stop
        self._calls = Calls()
        self._margin = Margin()
        self._opened = ""
        """Mark before the object that is read."""

    @property
    def num_done(self) -> int:
        """Number of calls that are complete."""
        return self._calls.num_begun - (
            self._read == self._in_call and self._calls.reader.name != ""
        )

    @property
    def is_call_open(self) -> bool:
        return self._calls.is_open

    def flush(self) -> Parts:
        parts = Parts()
        held = self._held
        if self._read == self._in_call and not self._calls.reader.name:
            if self._calls.num_begun:
                # The beginning of another call, cut off by the end of the answer, is not content.
                return parts
            held = self._opened + self._calls.reader.raw + held
        if self._stop and held.strip() == self._stop:
            held = ""
        if self._read != self._behind_call:
            parts.content = self._margin.push(held) + self._margin.flush()
        return parts

    def _in_text(self, text: str, parts: Parts) -> str:
        before, marker, rest = split_at(text, self._begins)
        parts.content += self._margin.push(before)
        if not marker:
            return self._wait(rest)
        self._begin(marker)
        return rest

    def _begin(self, marker: str) -> None:
        self._opened = marker
        self._calls.next()
        self._read = self._in_call

    def _in_call(self, text: str, parts: Parts) -> str:
        rest = self._calls.read(text, parts)
        if self._calls.reader.is_no_call:
            # The last character, which shows that this is not a call, may begin another mark.
            raw = self._calls.reader.raw
            self._read = self._in_text
            parts.content += self._margin.push(self._opened + raw[:-1])
            return raw[-1] + rest
        if self._calls.reader.name:
            self._margin.cut()
        if self._calls.reader.is_done:
            self._read = self._behind_call if self._end else self._in_text
        return rest

    def _behind_call(self, text: str, parts: Parts) -> str:
        """Reads up to the end mark; where it is missing, the call ends where the next one
        begins."""
        _, marker, rest = split_at(text, (*self._begins, self._end))
        if not marker:
            return self._wait(rest)
        self._calls.next()
        if marker == self._end:
            self._read = self._in_text
        else:
            self._begin(marker)
        return rest
