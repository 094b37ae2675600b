"""Parser of calls in the formats of `pythonic_formats`, from text as it comes. Text outside of the
marks is content."""

from __future__ import annotations

from collections.abc import Collection

from .parts import Margin, Parts, split_at
from .pythonic_formats import PythonicFormat
from .pythonic_parser import PythonicParser


class SectionParser(PythonicParser):
    """Reads the calls of sections, with text between them. A call of a function that was not
    offered ends the calls of its section, as text in it does."""

    def __init__(self, form: PythonicFormat, tool_names: Collection[str]) -> None:
        super().__init__(tool_names)
        self._form = form
        self._margin = Margin()
        self._opened = ""
        """Text since the mark of a section, while the section has no call."""

    def flush(self) -> Parts:
        if self._read == self._before_list or self._opened:
            return Parts(self._margin.push(self._opened + self._held) + self._margin.flush())
        return Parts()

    def _before_list(self, text: str, parts: Parts) -> str:
        before, marker, rest = split_at(text, (self._form.begin,))
        parts.content += self._margin.push(before)
        if not marker:
            return self._wait(rest)
        self._opened = marker
        self._read = self._behind_call
        return rest

    def _behind_call(self, text: str, parts: Parts) -> str:
        body = text.lstrip(self._form.separators)
        if self._opened:
            self._opened += text[: len(text) - len(body)]
        if not body:
            return ""
        match self._begins_call(body):
            case None:
                return self._wait(body)
            case False:
                return self._leave(body, parts)
        self._margin.cut()
        self._opened = ""
        return self._begin(body, parts)

    def _leave(self, text: str, parts: Parts) -> str:
        """Ends the calls of a section; a section without calls is content."""
        self._read = self._before_list if self._opened else self._behind_list
        parts.content += self._margin.push(self._opened)
        self._opened = ""
        return text

    def _behind_list(self, text: str, parts: Parts) -> str:
        _, marker, rest = split_at(text, (self._form.end,))
        if not marker:
            return self._wait(rest)
        self._read = self._before_list
        return rest
