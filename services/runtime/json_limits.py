"""Limits on JSON that clients send, checked before a decoder reads it.

A native decoder holds the interpreter while it reads, and its time depends on values as much as on
bytes: msgspec (0.22) takes 13 µs for `1e308` and 150 ns for a name that did not occur before.
`check_json` first counts by native passes over short slices, which take text in strings for JSON.
Only where such a count exceeds a limit, `counted` leaves the strings out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

from .errors import BadRequest

MAX_DEPTH = 128
"""Largest number of objects and lists within each other."""
MAX_EXPONENTS = 256
"""Largest number of numbers with an exponent: 3 ms of a decoder."""
MAX_LONG_DIGITS = 60_000
"""Largest number of digits of numbers that have 17 or more: 2 ms of a decoder."""
MAX_CONTAINERS = 128 * 1024
"""Largest number of objects and lists."""
MAX_STRINGS = 64 * 1024
"""Largest number of strings, names included. A history of 10,000 messages has as many; a body with
four times as many names took the interpreter 0.4 s (2026-11-29)."""
MAX_VALUES = 1024 * 1024
"""Largest number of entries of objects and lists."""
MAX_FIELD_VALUES = 64 * 1024
"""The same in a field that a chat template may write as JSON, which holds the interpreter for up to
150 ns each."""
TOO_COSTLY = "json_too_costly"
"""Code of the errors."""
SLICE_BYTES = 64 * 1024
"""Most bytes that a pass reads before other threads may run."""
STRINGS_BYTES = 16 * 1024
"""The same where strings may be short: a millisecond."""

_LONG = 17
_LONG_NUMBER = re.compile(rb"0{17,}")
_DIGITS = b"0123456789."
_TO_CLASSES = bytes(
    ord("0") if byte in _DIGITS else ord("e") if byte in b"eE" else ord(" ") for byte in range(256)
)
_NO_BRACKETS = bytes(byte for byte in range(256) if byte not in b"[]{}")
_TO_STEPS = bytes({ord("["): 1, ord("{"): 1}.get(byte, 255) for byte in range(256))
"""Brackets to signed bytes, by which depth changes."""
STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_WITH_WHOLE_STRINGS = re.compile(rb'(?:[^"]*+%s)*+' % STRING.pattern, re.DOTALL)
_IN_STRING = re.compile(rb'(?:[^"\\]{1,4096}+|\\.){0,64}+("?)', re.DOTALL)
"""The rest of a string, or as much of it as a short pass reads."""


@dataclass(slots=True)
class JsonCounts:
    """Counts of the parts of JSON that cost a decoder time."""

    exponents: int = 0
    long_digits: int = 0
    containers: int = 0
    strings: int = 0
    values: int = 0
    depth: int = 0

    def check(self, param: str | None, max_values: int) -> None:
        """Raises `BadRequest` naming the first limit that is exceeded."""
        where = "the body" if param is None else param
        for count, most, name in (
            (self.depth, MAX_DEPTH, "levels of objects and lists"),
            (self.exponents, MAX_EXPONENTS, "numbers with an exponent"),
            (self.long_digits, MAX_LONG_DIGITS, f"digits in numbers of {_LONG} or more"),
            (self.containers, MAX_CONTAINERS, "objects and lists"),
            (self.strings, MAX_STRINGS, "strings"),
            (self.values, max_values, "entries of objects and lists"),
        ):
            if count > most:
                raise BadRequest(
                    param, f"{where} has more than {most} {name}; allowed: {most}", code=TOO_COSTLY
                )


def check_json(text: bytes, param: str | None = None, *, max_values: int = MAX_VALUES) -> None:
    """Raises `BadRequest` for JSON that exceeds a limit; text that is no JSON may pass. `param` is
    the field that holds the text, None for a whole body. Linear in the text's length."""
    # Text of as few bytes exceeds no limit: histories have thousands of short arguments.
    if len(text) > MAX_DEPTH and _may_exceed(text, max_values):
        for counts in counted(text):
            counts.check(param, max_values)


def _may_exceed(text: bytes, max_values: int) -> bool:
    """Whether a limit may be exceeded, by counts that take text in strings for JSON."""
    brackets = b""
    exponents = long_runs = quotes = values = 0
    for start in range(0, len(text), SLICE_BYTES):
        part = text[start : start + SLICE_BYTES]
        classes = part.translate(_TO_CLASSES)
        exponents += classes.count(b"0e")
        long_runs += classes.count(b"0" * _LONG)
        quotes += part.count(b'"')
        values += part.count(b",")
        brackets += part.translate(None, _NO_BRACKETS)
        if len(brackets) > 2 * MAX_CONTAINERS:
            return True
    return (
        exponents > MAX_EXPONENTS
        or long_runs * 2 * _LONG > MAX_LONG_DIGITS
        or quotes > 2 * MAX_STRINGS
        or values > max_values
        or _may_be_deep(brackets)
    )


def _may_be_deep(brackets: bytes) -> bool:
    """Whether brackets may nest too deep, those in strings among them. Each round takes the
    innermost pairs away; after long rounds it is faster to count one by one."""
    levels = 0
    bytes_left = SLICE_BYTES + 2 * len(brackets)
    while brackets.count(b"[") + brackets.count(b"{") + levels > MAX_DEPTH:
        bytes_left -= len(brackets)
        rest = brackets.replace(b"[]", b"").replace(b"{}", b"")
        if bytes_left < 0 or len(rest) == len(brackets):
            return True
        brackets = rest
        levels += 1
    return False


def counted(text: bytes) -> Iterator[JsonCounts]:
    """Counts of what stands outside of strings: the same object, again after each slice."""
    counts = JsonCounts()
    depth = 0
    for part in _without_strings(text):
        classes = part.translate(_TO_CLASSES)
        counts.exponents += classes.count(b"0e")
        counts.long_digits += _num_long_digits(classes)
        counts.strings += part.count(b'"')
        counts.values += part.count(b",")
        counts.containers += part.count(b"[") + part.count(b"{")
        steps = memoryview(part.translate(_TO_STEPS, _NO_BRACKETS)).cast("b")
        depths = list(accumulate(steps, initial=depth))
        depth = depths[-1]
        deepest = max(depths)
        counts.depth = max(counts.depth, deepest)
        yield counts


def _num_long_digits(classes: bytes) -> int:
    if b"0" * _LONG not in classes:
        return 0
    return sum(map(len, _LONG_NUMBER.findall(classes)))


def _without_strings(text: bytes) -> Iterator[bytes]:
    """The text in slices, with a quotation mark in place of each string."""
    at = 0
    while at < len(text):
        whole = _WITH_WHOLE_STRINGS.match(text, at, at + STRINGS_BYTES)
        assert whole is not None
        if whole.end() > at:
            yield STRING.sub(b'"', whole.group())
            at = whole.end()
            continue
        end = text.find(b'"', at, at + SLICE_BYTES)
        yield text[at : at + SLICE_BYTES] if end < 0 else text[at : end + 1]
        at = at + SLICE_BYTES if end < 0 else behind_string(text, end + 1)


def behind_string(text: bytes, at: int) -> int:
    """Position behind the string in which `at` is; the text's end where the string has none."""
    while at < len(text):
        found = _IN_STRING.match(text, at)
        assert found is not None
        if found.group(1):
            return found.end()
        if found.end() == at:
            break
        at = found.end()
    return len(text)
