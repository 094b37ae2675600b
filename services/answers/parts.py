"""Parts of an answer's text as it comes: content, reasoning, calls. Knows no model's format.

Every reader of text in pieces keeps one rule: its output after some text depends on that text
alone, not on how it was cut into pieces. A resume relies on it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class CallDelta:
    """Part of a call: its name comes once, first; the arguments are JSON in pieces."""

    index: int
    name: str = ""
    arguments: str = ""
    is_text: bool = False
    """Whether it calls a custom tool, which takes text: `arguments` is then that text in pieces."""


@dataclass(slots=True)
class Parts:
    """Parts that some text made certain."""

    content: str = ""
    reasoning: str = ""
    calls: list[CallDelta] = field(default_factory=list)

    def add(self, more: Parts) -> None:
        self.content += more.content
        self.reasoning += more.reasoning
        for delta in more.calls:
            self.add_call(delta)

    def add_call(self, delta: CallDelta) -> None:
        """Adds a part of a call; parts of the same call are joined."""
        if self.calls and self.calls[-1].index == delta.index:
            self.calls[-1].name += delta.name
            self.calls[-1].arguments += delta.arguments
        elif delta.name or delta.arguments:
            self.calls.append(delta)

    @property
    def is_plain(self) -> bool:
        """Whether there is nothing but content."""
        return not (self.reasoning or self.calls)

    def within(self, limit: int) -> Iterator[Parts]:
        """The same in parts of at most `limit` characters each, except names and one empty part."""
        for start in range(0, max(len(self.content), len(self.reasoning), 1), limit):
            yield Parts(self.content[start : start + limit], self.reasoning[start : start + limit])
        for call in self.calls:
            for start in range(0, max(len(call.arguments), 1), limit):
                name = call.name if start == 0 else ""
                piece = call.arguments[start : start + limit]
                yield Parts(calls=[CallDelta(call.index, name, piece, is_text=call.is_text)])


class PartsParser(ABC):
    """Reads a stream of text in states. The state is a method, `_read`: it takes text, adds to the
    parts what is certain, and returns the text after what it took."""

    @property
    def is_reasoning(self) -> bool:
        """Whether the text that comes now is reasoning, of a format that has it beside calls."""
        return False

    def __init__(self, state: Callable[[str, Parts], str]) -> None:
        self._read = state
        self._held = ""
        """The end of the text, of which nothing is certain yet."""

    def push(self, text: str) -> Parts:
        """Parts that the text makes certain."""
        parts = Parts()
        text = self._held + text
        self._held = ""
        while text:
            text = self._read(text, parts)
        return parts

    @abstractmethod
    def flush(self) -> Parts:
        """Parts that are certain once the text has ended; nothing may be pushed after it."""

    def _wait(self, text: str) -> str:
        """Holds the text until more comes."""
        self._held = text
        return ""

    def _in_content(self, text: str, parts: Parts) -> str:
        parts.content += text
        return ""


class Margin:
    """Removes the white space around removed parts, but for one run of it between two texts: the
    run before the part, or the one after it where there is none before."""

    __slots__ = ("_gap", "_has_text", "_held", "_is_beside")

    def __init__(self, *, is_beside: bool = False) -> None:
        self._is_beside = is_beside
        """Whether nothing but white space came since the last removed part."""
        self._held = ""
        self._gap = ""
        self._has_text = False

    def push(self, text: str) -> str:
        text = self._held + text
        body = text.rstrip()
        self._held = text[len(body) :]
        if body and self._is_beside:
            piece = body.lstrip()
            gap = self._gap or body[: len(body) - len(piece)]
            body = gap + piece if self._has_text else piece
            self._gap = ""
            self._is_beside = False
        self._has_text = self._has_text or body != ""
        return body

    def cut(self) -> None:
        """Notes that a part was removed here."""
        self._gap = self._gap or self._held
        self._held = ""
        self._is_beside = True

    def flush(self) -> str:
        held = self._held
        self._held = ""
        return "" if self._is_beside else held


def split_at(text: str, markers: Sequence[str]) -> tuple[str, str, str]:
    """The text before the first marker, the marker, the text after it.

    Without a marker: the text that is certainly no part of one, nothing, and the end that may yet
    become one.
    """
    found = min(
        ((at, marker) for marker in markers if (at := text.find(marker)) >= 0), default=None
    )
    if found is not None:
        at, marker = found
        return text[:at], marker, text[at + len(marker) :]
    num_held = max((_overlap(text, marker) for marker in markers), default=0)
    return text[: len(text) - num_held], "", text[len(text) - num_held :]


def _overlap(text: str, marker: str) -> int:
    """Number of characters at the end of the text that begin the marker."""
    return next(
        (n for n in range(min(len(text), len(marker) - 1), 0, -1) if marker.startswith(text[-n:])),
        0,
    )
