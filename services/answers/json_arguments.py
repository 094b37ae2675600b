"""Reads the JSON object of a call's arguments, from text as it comes."""

from __future__ import annotations

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
