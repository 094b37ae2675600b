"""Parsers of calls in the formats of Hermes and Qwen, Llama 3 and xLAM, from text as it comes.

Each parser passes on text outside of calls as content. Pythonic calls have a file of their own.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import ClassVar

from .call_reader import CallReader
from .parts import CallDelta, Margin, Parts, PartsParser, split_at


class Calls:
    """The calls of one answer, numbered; with `names`, only calls of these."""

    def __init__(self, names: Collection[str] | None = None) -> None:
        self.num_begun = 0
        self._names = names
        self._reader = CallReader(names)
        self._is_named = False

    def read(self, text: str, parts: Parts) -> str:
        """Reads the characters of the next call, until `reader` is done; returns the text behind
        it."""
        rest = self._reader.push(text)
        if self._reader.name:
            if not self._is_named:
                self._is_named = True
                self.begin(self._reader.name, parts)
            self.add(self._reader.take_arguments(), parts)
        return rest

    @property
    def reader(self) -> CallReader:
        return self._reader

    @property
    def is_open(self) -> bool:
        """Whether the call that `reader` reads has a name, and arguments that have not ended."""
        return self._is_named and not self._reader.has_whole_arguments

    def next(self) -> None:
        self._reader = CallReader(self._names)
        self._is_named = False

    def begin(self, name: str, parts: Parts) -> None:
        self.num_begun += 1
        parts.add_call(CallDelta(self.num_begun - 1, name))

    def add(self, arguments: str, parts: Parts) -> None:
        if arguments:
            parts.add_call(CallDelta(self.num_begun - 1, "", arguments))


class HermesParser(PartsParser):
    """Reads `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, any number of times, with text
    between them."""

    markers: ClassVar[tuple[str, ...]] = ("<tool_call>", "</tool_call>")

    def __init__(self, tool_names: Collection[str]) -> None:
        super().__init__(self._in_text)
        self._calls = Calls()
        self._margin = Margin()

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
                # Another call, which the end of the answer cut off: its beginning is no content.
                return parts
            held = self.markers[0] + self._calls.reader.raw + held
        if self._read != self._behind_call:
            parts.content = self._margin.push(held) + self._margin.flush()
        return parts

    def _in_text(self, text: str, parts: Parts) -> str:
        before, marker, rest = split_at(text, self.markers[:1])
        parts.content += self._margin.push(before)
        if marker:
            self._calls.next()
            self._read = self._in_call
            return rest
        return self._wait(rest)

    def _in_call(self, text: str, parts: Parts) -> str:
        rest = self._calls.read(text, parts)
        if self._calls.reader.is_no_call:
            # The last character, which shows that it is no call, may begin another tag.
            raw = self._calls.reader.raw
            self._read = self._in_text
            parts.content += self._margin.push(self.markers[0] + raw[:-1])
            return raw[-1] + rest
        if self._calls.reader.is_done:
            self._read = self._behind_call
        if self._calls.reader.name:
            self._margin.cut()
        return rest

    def _behind_call(self, text: str, parts: Parts) -> str:
        """Reads up to the closing tag; where it is missing, the call ends where the next one
        begins."""
        _, marker, rest = split_at(text, self.markers)
        if not marker:
            return self._wait(rest)
        self._calls.next()
        self._read = self._in_text if marker == self.markers[1] else self._in_call
        return rest


class LlamaJsonParser(PartsParser):
    """Reads `{"name": …, "parameters": {…}}` as the whole answer; several calls stand beside each
    other.

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
