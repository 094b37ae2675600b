"""Reads the JSON object of a call's arguments, from text as it comes."""

from __future__ import annotations

from collections.abc import Callable

from .call_reader import JsonValue


class ArgumentsReader:
    """Passes the object on as it comes. A call without an object, whose text goes on with another
    character, has no arguments."""

    __slots__ = ("_value", "is_done")

    def __init__(self) -> None:
        self._value: JsonValue | None = None
        self.is_done = False

    def push(self, text: str) -> tuple[str, str]:
        """Takes text; returns the part of it that is JSON, and the text after the object."""
        if self._value is not None:
            return self._inside(self._value, text, 0)
        text = text.lstrip()
        if not text:
            return "", ""
        if text[0] != "{":
            self.is_done = True
            return "{}", text
        self._value = JsonValue("{")
        return self._inside(self._value, text, 1)

    def _inside(self, value: JsonValue, text: str, start: int) -> tuple[str, str]:
        for i in range(start, len(text)):
            if value.take(text[i]):
                self.is_done = True
                return text[: i + 1], text[i + 1 :]
        return text, ""


class ArgumentPieces:
    """Arguments of another notation that come in pieces and are written as JSON. `_read` is the
    state of the reader: it takes text and returns what it has not read."""

    def __init__(self, first: Callable[[str], str]) -> None:
        self._held = ""
        """Text that the next piece continues."""
        self._json: list[str] = []
        self._read = first
        self.is_done = False

    def push(self, text: str) -> str:
        """Takes text; returns the text behind the arguments."""
        text = self._held + text
        self._held = ""
        while text and not self.is_done:
            text = self._read(text)
        return text

    def take(self) -> str:
        """JSON that came since the last call."""
        taken = "".join(self._json)
        self._json = []
        return taken

    def _wait(self, text: str) -> str:
        self._held = text
        return ""
