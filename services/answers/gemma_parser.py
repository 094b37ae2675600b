"""Reads calls in Gemma's formats, `<|tool_call>call:weather{city:<|"|>Ulm<|"|>}<tool_call|>`: names
without quotes, and strings between marks of their own."""

from __future__ import annotations

import json
import re

from .call_reader import with_halves_escaped
from .gemma_formats import CALL, GemmaFormat
from .json_arguments import ArgumentPieces
from .parts import CallDelta, Margin, Parts, PartsParser, split_at

_HEAD = re.compile(rf"\s*{CALL}\s*([^\s{{}}<>]{{1,256}})\s*\{{")
_MAX_HEAD = 512
_SPACE = " \t\r\n"


class GemmaParser(PartsParser):
    """Reads calls, with text between them."""

    def __init__(self, form: GemmaFormat) -> None:
        super().__init__(self._in_text)
        self._form = form
        self._margin = Margin()
        self._num_begun = 0
        self._arguments = GemmaArguments(form.quote)
        self.num_done = 0
        """Number of calls that are complete."""

    @property
    def is_call_open(self) -> bool:
        return self._num_begun > self.num_done

    def flush(self) -> Parts:
        if self._read == self._in_head and not self._num_begun:
            return Parts(self._margin.push(self._form.begin + self._held) + self._margin.flush())
        if self._read == self._in_text:
            return Parts(self._margin.push(self._held) + self._margin.flush())
        # A call that the end of the answer cut off: its beginning is no content.
        return Parts()

    def _in_text(self, text: str, parts: Parts) -> str:
        before, marker, rest = split_at(text, (self._form.begin, self._form.end))
        parts.content += self._margin.push(before)
        if not marker:
            return self._wait(rest)
        if marker == self._form.begin:
            self._read = self._in_head
        elif self._num_begun:
            self._margin.cut()
        else:
            parts.content += self._margin.push(marker)
        return rest

    def _in_head(self, text: str, parts: Parts) -> str:
        found = _HEAD.match(text)
        if found is None:
            if "{" not in text and "<" not in text and len(text) < _MAX_HEAD:
                return self._wait(text)
            parts.content += self._margin.push(self._form.begin)
            self._read = self._in_text
            return text
        self._margin.cut()
        parts.add_call(CallDelta(self._num_begun, found.group(1)))
        self._num_begun += 1
        self._arguments = GemmaArguments(self._form.quote)
        self._read = self._in_arguments
        # With the bracket, which begins the arguments.
        return text[found.end() - 1 :]

    def _in_arguments(self, text: str, parts: Parts) -> str:
        rest = self._arguments.push(text)
        if arguments := self._arguments.take():
            parts.add_call(CallDelta(self._num_begun - 1, "", arguments))
        if self._arguments.is_done:
            self.num_done += 1
            self._read = self._in_text
        return rest


class GemmaArguments(ArgumentPieces):
    """Writes arguments as JSON while they come."""

    def __init__(self, quote: str) -> None:
        super().__init__(self._between)
        self._quote = quote
        self._open: list[str] = []
        """Brackets that are not closed."""
        self._bare: list[str] = []
        """Name or value without quotes, which has no end yet."""
        self._is_quoted = False
        """Whether the last text stood between quotes."""

    def _between(self, text: str) -> str:
        """Reads brackets, names, separators and values without quotes."""
        if text.startswith(self._quote):
            self._json.append('"')
            self._read = self._in_string
            return text[len(self._quote) :]
        if self._quote.startswith(text):
            return self._wait(text)
        char = text[0]
        if char in "{[":
            self._open.append(char)
            self._json.append(char)
        elif char in "}]":
            self._end_bare()
            self._json.append("}" if self._open.pop() == "{" else "]")
            self.is_done = not self._open
        elif char == ",":
            self._end_bare()
            self._json.append(", ")
        elif char == ":" and self._open[-1] == "{":
            self._end_name()
        elif char not in _SPACE or self._bare:
            self._bare.append(char)
        return text[1:]

    def _end_name(self) -> None:
        """Writes a name, unless it stood between quotes."""
        if not self._is_quoted:
            name = "".join(self._bare).strip()
            self._json.append(json.dumps(name, ensure_ascii=False))
        self._bare = []
        self._is_quoted = False
        self._json.append(": ")

    def _end_bare(self) -> None:
        """Writes a value without quotes: JSON, or else text."""
        self._is_quoted = False
        if not self._bare:
            return
        written = "".join(self._bare).strip()
        self._bare = []
        try:
            value = json.loads(written, parse_constant=lambda word: word)
        except (ValueError, RecursionError):
            value = None if written == "None" else written
        self._json.append(json.dumps(value, ensure_ascii=False))

    def _in_string(self, text: str) -> str:
        """Passes a string on as it comes."""
        string, marker, rest = split_at(text, (self._quote,))
        self._json.append(with_halves_escaped(json.dumps(string, ensure_ascii=False)[1:-1]))
        if not marker:
            return self._wait(rest)
        self._json.append('"')
        self._is_quoted = True
        self._read = self._between
        return rest
