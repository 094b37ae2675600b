"""Calls written as Python, one a line between tags, as OLMo 3 writes them."""

from __future__ import annotations

from collections.abc import Collection
from typing import ClassVar

from .parts import Margin, Parts, split_at
from .pythonic_parser import PythonicParser

OPENING = "<function_calls>"
CLOSING = "</function_calls>"


class OlmoParser(PythonicParser):
    """Reads the calls of one section, with text before it. Calls of functions that were not offered
    end the section, as text in it does."""

    markers: ClassVar[tuple[str, ...]] = (OPENING, CLOSING)

    def __init__(self, tool_names: Collection[str]) -> None:
        super().__init__(tool_names)
        self._margin = Margin()

    def flush(self) -> Parts:
        if self._read != self._before_list:
            return Parts()
        return Parts(self._margin.push(self._held) + self._margin.flush())

    def _before_list(self, text: str, parts: Parts) -> str:
        before, marker, rest = split_at(text, (OPENING,))
        parts.content += self._margin.push(before)
        if not marker:
            return self._wait(rest)
        self._margin.cut()
        self._read = self._behind_call
        return rest

    def _behind_call(self, text: str, parts: Parts) -> str:
        match self._begins_call(text.lstrip()):
            case None:
                return self._wait(text)
            case False:
                self._read = self._behind_list
                return text
        return self._begin(text.lstrip(), parts)
