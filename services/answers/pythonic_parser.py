"""Calls written as Python: `[weather(city="Ulm"), time()]`, as Llama 3.2 and 4 do. Arguments become
JSON."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Collection
from typing import ClassVar

from .call_reader import with_halves_escaped
from .parts import CallDelta, Parts, PartsParser

_CALL = re.compile(r"\s*([\w.-]+)\s*\(")
# Possessive: white space that could be on either side of the comma takes quadratic time otherwise.
_ARGUMENT = re.compile(r"""\s*+,?\s*+([^\s,=()\[\]{}"']+)\s*=\s*""")
_ARGUMENT_BEGUN = re.compile(r"""\s*+,?\s*+[^\s,=()\[\]{}"']*+\s*+""")
_END = re.compile(r"\s*+,?\s*+\)")
_SEPARATOR = re.compile(r"\s*,\s*")
_LAST = re.compile(r"\s*\]")
_QUOTES = "\"'"
_OPENING = "([{"
_CLOSING = ")]}"


class PythonicParser(PartsParser):
    """Reads a list of calls that is the whole answer. Only a list whose first call names an offered
    function and gives its first argument by name counts: JSON has no arguments by position."""

    markers: ClassVar[tuple[str, ...]] = ("<|python_start|>", "<|python_end|>")

    def __init__(self, tool_names: Collection[str]) -> None:
        super().__init__(self._before_list)
        self._tool_names = tool_names
        self._num_begun = self._num_arguments = 0
        self._value: _PythonValue | None = None
        self.num_done = 0
        """Number of calls that are complete."""

    @property
    def is_call_open(self) -> bool:
        return self._num_begun > self.num_done

    def flush(self) -> Parts:
        # The rest of an unfinished call has no form in JSON, and text after the list is no answer.
        return Parts("" if self._num_begun else self._held)

    def _before_list(self, text: str, parts: Parts) -> str:
        opening = text.lstrip().removeprefix(self.markers[0]).lstrip()
        if self.markers[0].startswith(opening) or opening == "[":
            return self._wait(text)
        if not opening.startswith("["):
            return self._give_up(text, parts)
        match self._begins_call(opening[1:]):
            case None:
                return self._wait(text)
            case False:
                return self._give_up(text, parts)
        return self._begin(opening[1:], parts)

    def _begins_call(self, text: str) -> bool | None:
        """Whether the text begins a call of an offered function; None where more text decides."""
        found = _CALL.match(text)
        if found is None:
            could_be = text.strip()
            return None if any(name.startswith(could_be) for name in self._tool_names) else False
        return found.group(1) in self._tool_names and _has_arguments(text[found.end() :])

    def _in_arguments(self, text: str, parts: Parts) -> str:
        if (end := _END.match(text)) is not None:
            self._emit("}" if self._num_arguments else "{}", parts)
            self.num_done += 1
            self._read = self._behind_call
            return text[end.end() :]
        found = _ARGUMENT.match(text)
        if found is None or found.end() == len(text):
            return self._wait(text)
        opening = "{" if self._num_arguments == 0 else ", "
        self._num_arguments += 1
        self._emit(f"{opening}{json.dumps(found.group(1))}: ", parts)
        self._value = _PythonValue()
        self._read = self._in_value
        return text[found.end() :]

    def _in_value(self, text: str, parts: Parts) -> str:
        assert self._value is not None
        end = self._value.push(text)
        if end is None:
            return ""
        self._emit(self._value.as_json(), parts)
        self._read = self._in_arguments
        return text[end:]

    def _behind_call(self, text: str, parts: Parts) -> str:
        if _LAST.match(text) is not None:
            self._read = self._behind_list
            return text
        separator = _SEPARATOR.match(text)
        found = _CALL.match(text, separator.end()) if separator is not None else None
        has_arguments = None if found is None else _has_arguments(text[found.end() :])
        if separator is None or has_arguments is None:
            return self._wait(text)
        if not has_arguments:
            self._read = self._behind_list
            return text
        return self._begin(text[separator.end() :], parts)

    def _behind_list(self, text: str, parts: Parts) -> str:
        return ""

    def _give_up(self, text: str, parts: Parts) -> str:
        self._read = self._in_content
        return text

    def _begin(self, text: str, parts: Parts) -> str:
        """Begins the call with which the text begins; returns the text of its arguments."""
        call = _CALL.match(text)
        assert call is not None
        parts.add_call(CallDelta(self._num_begun, call.group(1)))
        self._num_begun += 1
        self._num_arguments = 0
        self._read = self._in_arguments
        return text[call.end() :]

    def _emit(self, arguments: str, parts: Parts) -> None:
        parts.add_call(CallDelta(self._num_begun - 1, "", arguments))


def _has_arguments(text: str) -> bool | None:
    """Whether a call's text after its opening bracket is empty up to the closing one, or begins
    with an argument by name; None where more text decides."""
    if _END.match(text) is not None or _ARGUMENT.match(text) is not None:
        return True
    return None if _ARGUMENT_BEGUN.fullmatch(text) is not None else False


class _PythonValue:
    """A literal up to the comma or bracket that ends it."""

    def __init__(self) -> None:
        self._taken: list[str] = []
        self._depth = 0
        self._quote = ""
        self._is_escaped = False

    def push(self, text: str) -> int | None:
        """Position at which the value ends; None where it does not end."""
        for i, char in enumerate(text):
            if self._depth == 0 and not self._quote and char in ",)":
                return i
            self._taken.append(char)
            self._take(char)
        return None

    def _take(self, char: str) -> None:
        if self._quote:
            if self._is_escaped:
                self._is_escaped = False
            elif char == "\\":
                self._is_escaped = True
            elif char == self._quote:
                self._quote = ""
        elif char in _QUOTES:
            self._quote = char
        else:
            self._depth += (char in _OPENING) - (char in _CLOSING)

    def as_json(self) -> str:
        """The value as JSON. Python's literals and JSON's are both taken; other values stay the
        text that they are."""
        written = "".join(self._taken).strip()
        # Some models break lines in strings.
        on_one_line = written.replace("\r", "\\r").replace("\n", "\\n")
        for text in dict.fromkeys((written, on_one_line)):
            for read in (json.loads, ast.literal_eval):
                try:
                    return with_halves_escaped(
                        json.dumps(read(text), ensure_ascii=False, allow_nan=False)
                    )
                except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
                    continue
        return json.dumps(written, ensure_ascii=False)
