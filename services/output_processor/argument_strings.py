"""Finds the text in a call's arguments: the string values of their JSON. Knows no stop strings."""

from __future__ import annotations

_HEX_DIGITS = 4


class ArgumentStrings:
    """Scanner of one call's arguments, which may be cut or malformed.

    Names of arguments, punctuation, numbers and escapes are no text.
    """

    __slots__ = ("_brackets", "_expects_name", "_is_name", "_is_string", "_num_escaped")

    def __init__(self) -> None:
        self._brackets: list[str] = []
        self._expects_name = False
        self._is_string = False
        self._is_name = False
        self._num_escaped = 0
        """Number of characters of an escape that are still to come; −1: the next one decides."""

    def is_text(self, char: str) -> bool:
        """Takes the next character; whether it stands for itself in a string value."""
        if self._is_string:
            return self._is_text_of_string(char)
        match char:
            case '"':
                self._is_string = True
                self._is_name = self._expects_name
            case "{" | "[":
                self._brackets.append(char)
                self._expects_name = char == "{"
            case "}" | "]":
                self._expects_name = False
                if self._brackets:
                    self._brackets.pop()
            case ",":
                self._expects_name = self._brackets[-1:] == ["{"]
            case ":":
                self._expects_name = False
        return False

    def _is_text_of_string(self, char: str) -> bool:
        if self._num_escaped:
            is_code = self._num_escaped < 0 and char == "u"
            self._num_escaped = _HEX_DIGITS if is_code else max(self._num_escaped - 1, 0)
            return False
        if char == "\\":
            self._num_escaped = -1
            return False
        self._is_string = char != '"'
        return self._is_string and not self._is_name
