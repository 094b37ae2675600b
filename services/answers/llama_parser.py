"""Parsers of calls in the formats of Llama 3 and xLAM: JSON objects that are the whole answer."""

from __future__ import annotations

from collections.abc import Collection
from typing import ClassVar

from .calls import Calls
from .parts import Parts, PartsParser


class LlamaJsonParser(PartsParser):
    """Reads `{"name": …, "parameters": {…}}` as the whole answer; several calls follow one
    another.

    Calls have no mark, so an object counts as one only if it names an offered function.
    """

    markers: ClassVar[tuple[str, ...]] = ("<|python_tag|>",)
    _BETWEEN: ClassVar[str] = "; \t\r\n,"

    def __init__(self, tool_names: Collection[str]) -> None:
        super().__init__(self._before_call)
        self._calls = Calls(tool_names)
        self._skipped = ""

    @property
    def num_done(self) -> int:
        return self._calls.num_begun - (
            self._calls.reader.name != "" and not self._calls.reader.is_done
        )

    @property
    def is_call_open(self) -> bool:
        return self._calls.is_open

    def flush(self) -> Parts:
        if self._read == self._before_call:
            # Separators of calls are no content where no call follows.
            return Parts("" if self._calls.num_begun else self._skipped + self._held)
        is_open = self._read == self._in_call and not self._calls.reader.name
        if is_open and self._calls.num_begun:
            # Another call, which the end of the answer cut off.
            return Parts()
        return Parts(self._skipped + self._calls.reader.raw if is_open else "")

    def _before_call(self, text: str, parts: Parts) -> str:
        """Reads white space, separators and the tag; anything else makes the rest of the answer
        plain text."""
        body = text.lstrip(self._BETWEEN)
        self._skipped += text[: len(text) - len(body)]
        if body.startswith(self.markers[0]):
            self._skipped = ""
            return body[len(self.markers[0]) :]
        if body.startswith("{"):
            self._calls.next()
            self._read = self._in_call
            return body
        if self.markers[0].startswith(body):
            return self._wait(body)
        return self._give_up(body, parts)

    def _in_call(self, text: str, parts: Parts) -> str:
        rest = self._calls.read(text, parts)
        if self._calls.reader.is_no_call:
            return self._give_up(self._calls.reader.raw + rest, parts)
        if self._calls.reader.name:
            self._skipped = ""
        if self._calls.reader.is_done:
            self._read = self._before_call
        return rest

    def _give_up(self, text: str, parts: Parts) -> str:
        parts.content += self._skipped + text
        self._skipped = ""
        self._read = self._in_content
        return ""


class XlamParser(LlamaJsonParser):
    """Reads the same objects in a list, `[{"name": …, "arguments": {…}}, …]`, as the whole
    answer."""

    _BETWEEN = LlamaJsonParser._BETWEEN + "[]"
