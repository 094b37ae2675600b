"""Parser of calls in the formats of `list_formats`, from text as it comes. Text outside of the list
is content."""

from __future__ import annotations

from .calls import Calls
from .json_arguments import ArgumentsReader
from .list_formats import ListFormat
from .parts import Margin, Parts, PartsParser, split_at


class ListParser(PartsParser):
    """Reads lists of calls, with text between them."""

    def __init__(self, form: ListFormat) -> None:
        super().__init__(self._in_text)
        self._form = form
        self._marks = (form.begin, *((form.end,) if form.end else ()))
        self._calls = Calls(has_name_as_key=not form.name_key)
        self._margin = Margin()
        self._arguments = ArgumentsReader()
        self._opened = ""
        """The last mark before a list, and white space after it."""

    @property
    def num_done(self) -> int:
        is_open = self._read == self._in_arguments or (
            self._read == self._in_object and self._calls.reader.name != ""
        )
        return self._calls.num_begun - is_open

    @property
    def is_call_open(self) -> bool:
        return self._read == self._in_arguments or self._calls.is_open

    def flush(self) -> Parts:
        if self._read == self._in_text:
            return Parts(self._margin.push(self._held) + self._margin.flush())
        is_in_object = self._read == self._in_object and not self._calls.reader.name
        if self._calls.num_begun and (is_in_object or self._read == self._in_name):
            # Another call, which the end of the answer cut off.
            return Parts()
        if is_in_object:
            return Parts(self._calls.reader.raw)
        if self._read == self._behind_marker:
            return Parts(self._margin.push(self._opened) + self._margin.flush())
        return Parts("" if self._read == self._in_list else self._held)

    def _in_text(self, text: str, parts: Parts) -> str:
        before, marker, rest = split_at(text, self._marks)
        parts.content += self._margin.push(before)
        if not marker:
            return self._wait(rest)
        if marker == self._form.begin:
            self._opened = marker
            self._read = self._behind_marker
        else:
            self._margin.cut()
        return rest

    def _behind_marker(self, text: str, parts: Parts) -> str:
        body = text.lstrip()
        self._opened += text[: len(text) - len(body)]
        if not body:
            return ""
        if body[0] in "[{" or self._form.has_named_calls:
            self._margin.cut()
            self._read = self._in_list if body[0] in "[{" else self._in_name
        else:
            parts.content += self._margin.push(self._opened)
            self._read = self._in_text
        return body

    def _in_list(self, text: str, parts: Parts) -> str:
        """Reads between the objects of a list: brackets, commas, white space; text again behind
        it."""
        text = text.lstrip("[, \t\r\n")
        if text.startswith("{"):
            self._calls.next()
            self._read = self._in_object
        elif text:
            self._read = self._in_text
            return text.removeprefix("]")
        return text

    def _in_object(self, text: str, parts: Parts) -> str:
        rest = self._calls.read(text, parts)
        if self._calls.reader.is_no_call:
            parts.content += self._margin.push(self._calls.reader.raw)
            self._read = self._in_text
        elif self._calls.reader.is_done:
            self._read = self._in_list
        return rest

    def _in_name(self, text: str, parts: Parts) -> str:
        """Reads the name, perhaps an id, then the arguments' object."""
        name, brace, _ = text.partition("{")
        if not brace:
            return self._wait(text)
        self._calls.begin(name.split("[")[0].strip(), parts)
        self._arguments = ArgumentsReader()
        self._read = self._in_arguments
        return text[len(name) :]

    def _in_arguments(self, text: str, parts: Parts) -> str:
        written, rest = self._arguments.push(text)
        self._calls.add(written, parts)
        if self._arguments.is_done:
            self._read = self._in_text
        return rest
