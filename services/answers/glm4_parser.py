"""Reads calls in the format of GLM-4: the name of a function on a line, and its arguments as JSON
behind it."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import ClassVar

from .json_arguments import ArgumentsReader
from .parts import CallDelta, Margin, Parts, PartsParser, split_at

NEXT = "<|assistant|>"
"""Mark between two messages of an answer."""
_HEAD = re.compile(r"([^\s{}]+)[ \t\r]*\n\s*\{")


class Glm4Parser(PartsParser):
    """Reads messages that are a call each, or content. Calls have no mark, so a message is one only
    if its first line is the name of an offered function and `{` follows."""

    markers: ClassVar[tuple[str, ...]] = (NEXT,)

    def __init__(self, tool_names: Collection[str]) -> None:
        super().__init__(self._before_message)
        self._tool_names = tool_names
        self._margin = Margin()
        self._num_begun = 0
        self._arguments = ArgumentsReader()
        self.num_done = 0
        """Number of calls that are complete."""

    @property
    def is_call_open(self) -> bool:
        return self._num_begun > self.num_done

    def flush(self) -> Parts:
        if self._num_begun and self._read != self._in_message:
            # A call that the end of the answer cut off: its beginning is no content.
            return Parts()
        return Parts(self._margin.push(self._held) + self._margin.flush())

    def _before_message(self, text: str, parts: Parts) -> str:
        body = text.lstrip()
        if body.startswith(NEXT):
            self._margin.cut()
            return body[len(NEXT) :]
        found = _HEAD.match(body)
        if found is not None and found.group(1) in self._tool_names:
            return self._begin_call(found.group(1), body[found.end() - 1 :], parts)
        if NEXT.startswith(body) or self._may_become_call(body):
            return self._wait(text)
        self._read = self._in_message
        return text

    def _may_become_call(self, text: str) -> bool:
        name = text.rstrip()
        return name in self._tool_names or (
            name == text and any(each.startswith(name) for each in self._tool_names)
        )

    def _in_message(self, text: str, parts: Parts) -> str:
        """Reads content up to the next message."""
        written, marker, rest = split_at(text, (NEXT,))
        parts.content += self._margin.push(written)
        if not marker:
            return self._wait(rest)
        self._read = self._before_message
        return marker + rest

    def _begin_call(self, name: str, arguments: str, parts: Parts) -> str:
        self._margin.cut()
        parts.add_call(CallDelta(self._num_begun, name))
        self._num_begun += 1
        self._arguments = ArgumentsReader()
        self._read = self._in_arguments
        return arguments

    def _in_arguments(self, text: str, parts: Parts) -> str:
        written, rest = self._arguments.push(text)
        parts.add_call(CallDelta(self._num_begun - 1, "", written))
        if self._arguments.is_done:
            self.num_done += 1
            self._margin.cut()
            self._read = self._before_message
        return rest
