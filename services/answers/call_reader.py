"""Reads one call written as a JSON object, `{"name": …, "arguments": {…}}`, from text that comes in
pieces."""

from __future__ import annotations

import json
from collections.abc import Collection
from enum import Enum

NAME_KEYS = ("name", "function", "tool_name")
ARGUMENT_KEYS = ("arguments", "parameters")
OTHER_KEYS = ("type", "id", "tool_call_id")
"""Keys besides name and arguments that a call may have."""
_SPACE = " \t\r\n"
_OPENING = "{["
_CLOSING = "}]"


class _At(Enum):
    """Place of the next character in the object."""

    START = "before the object"
    KEY = "before a key"
    IN_KEY = "in a key"
    COLON = "before a value's colon"
    VALUE = "before a value"
    IN_VALUE = "in a value"
    COMMA = "behind a value"


class JsonValue:
    """Finds the end of a JSON value. It looks at brackets and strings only: malformed JSON stays as
    it is."""

    __slots__ = ("_depth", "_is_escaped", "_is_in_string", "_is_scalar")

    def __init__(self, first: str) -> None:
        self._is_in_string = first == '"'
        self._is_escaped = False
        self._depth = 1 if first in _OPENING else 0
        self._is_scalar = not (self._depth or self._is_in_string)

    def ends_before(self, char: str) -> bool:
        """Whether the value ends before this character: a number or a word ends where something
        else begins."""
        return self._is_scalar and (char in ",}]" or char in _SPACE)

    def take(self, char: str) -> bool:
        """Whether the value ends with this character."""
        if self._is_in_string:
            if self._is_escaped:
                self._is_escaped = False
            elif char == "\\":
                self._is_escaped = True
            elif char == '"':
                self._is_in_string = False
                return self._depth == 0
        elif char == '"':
            self._is_in_string = True
        elif char in _OPENING:
            self._depth += 1
        elif char in _CLOSING:
            self._depth -= 1
            return self._depth == 0
        return False


class CallReader:
    """Reads characters until the object ends, or until it is clear that it is no call.

    With `names`, only an object that names one of them is a call. With `has_name_as_key` the
    object is `{NAME: {…}}`.
    """

    def __init__(
        self, names: Collection[str] | None = None, *, has_name_as_key: bool = False
    ) -> None:
        self._names = names
        self._has_name_as_key = has_name_as_key
        self.name = ""
        self._raw: list[str] = []
        self.is_done = False
        self.is_no_call = False
        self._at = _At.START
        self._key = ""
        self._value: list[str] = []
        self._scan: JsonValue | None = None
        self._streams = False
        """Whether the value's characters are passed on as arguments as they come."""
        self._arguments: list[str] = []
        self._has_arguments = False

    @property
    def raw(self) -> str:
        """All characters taken while no name was known, in case that it is no call."""
        return "".join(self._raw)

    @property
    def has_whole_arguments(self) -> bool:
        """Whether the arguments are complete; text after them changes nothing."""
        return self.is_done or (self._has_arguments and not self._streams)

    def push(self, text: str) -> str:
        """Reads characters of the object. Returns the text after it, or after the character that
        shows that it is not a call."""
        for i, char in enumerate(text):
            if self.is_done or self.is_no_call:
                return text[i:]
            if not self.name:
                self._raw.append(char)
            self._take(char)
        return ""

    def take_arguments(self) -> str:
        """Arguments that came since the last call, once the name is known."""
        if not self.name:
            return ""
        taken = "".join(self._arguments)
        self._arguments = []
        if self.is_done and not self._has_arguments:
            self._has_arguments = True
            return "{}"
        return taken

    def _take(self, char: str) -> None:
        if self._at is _At.IN_VALUE:
            self._take_in_value(char)
        elif self._at is _At.IN_KEY:
            assert self._scan is not None
            self._key += char
            if self._scan.take(char):
                self._end_key()
        elif char in _SPACE:
            pass
        elif self._at is _At.START:
            self._expect(char, "{", _At.KEY)
        elif self._at is _At.COLON:
            self._expect(char, ":", _At.VALUE)
        elif self._at is _At.VALUE:
            self._begin_value(char)
        elif char == "}":
            self._end()
        elif self._at is _At.COMMA:
            self._expect(char, ",", _At.KEY)
        else:
            self._key = char
            self._scan = JsonValue(char)
            self._expect(char, '"', _At.IN_KEY)

    def _expect(self, char: str, expected: str, then: _At) -> None:
        if char == expected:
            self._at = then
        elif self.name:
            self._end()
        else:
            self.is_no_call = True

    def _end_key(self) -> None:
        self._at = _At.COLON
        if self._has_name_as_key and not self.name:
            self._end_name(_loaded(self._key))
            self._key = ARGUMENT_KEYS[0]
            return
        self._key = self._key[1:-1]
        if not self.name and self._key not in (*NAME_KEYS, *ARGUMENT_KEYS, *OTHER_KEYS):
            self.is_no_call = True

    def _begin_value(self, char: str) -> None:
        self._at = _At.IN_VALUE
        self._value = [char]
        self._scan = JsonValue(char)
        self._streams = self._key in ARGUMENT_KEYS and char == "{" and not self._has_arguments
        if self._streams:
            self._has_arguments = True
            self._arguments.append(char)

    def _take_in_value(self, char: str) -> None:
        assert self._scan is not None
        if self._scan.ends_before(char):
            self._end_value()
            if char not in _SPACE:
                self._take(char)
            return
        (self._arguments if self._streams else self._value).append(char)
        if self._scan.take(char):
            self._end_value()

    def _end_value(self) -> None:
        self._at = _At.COMMA
        if self._streams:
            self._streams = False
        elif self._key in NAME_KEYS:
            self._end_name(_loaded("".join(self._value)))
        elif self._key in ARGUMENT_KEYS and not self._has_arguments:
            self._has_arguments = True
            loaded = _loaded("".join(self._value))
            # Some models write the object as a string, and null for no arguments.
            self._arguments = (
                [loaded] if isinstance(loaded, str) else ["{}"] if loaded is None else self._value
            )

    def _end_name(self, name: object) -> None:
        if isinstance(name, str) and not self.name and (self._names is None or name in self._names):
            self.name = name
        elif not self.name:
            self.is_no_call = True

    def _end(self) -> None:
        if self.name:
            self.is_done = True
        else:
            self.is_no_call = True


def _loaded(text: str) -> object:
    """The value as Python's; None for what cannot be read."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return with_halves_escaped(value) if isinstance(value, str) else value


def with_halves_escaped(text: str) -> str:
    r"""The text with halves of surrogate pairs as escapes, `\ud800`: no message can carry them as
    characters."""
    return text.encode(errors="backslashreplace").decode()
