"""Finds stop strings in text that comes in pieces. Knows nothing about tokens."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Stops:
    """The stop strings of a request, compiled; shared by its choices."""

    strings: tuple[str, ...]
    failures: tuple[tuple[int, ...], ...]
    """Failure function of Knuth, Morris and Pratt: the state of a match after a character that does
    not fit."""
    first_characters: re.Pattern[str]
    include_in_output: bool

    @classmethod
    def compile(cls, strings: Sequence[str], *, include_in_output: bool = False) -> Stops:
        unique = tuple(dict.fromkeys(strings))
        firsts = re.compile("[" + "".join(re.escape(string[0]) for string in unique) + "]")
        return cls(unique, tuple(_failures(string) for string in unique), firsts, include_in_output)


def _failures(string: str) -> tuple[int, ...]:
    failures = [0]
    length = 0
    for char in string[1:]:
        while length and char != string[length]:
            length = failures[length - 1]
        length += char == string[length]
        failures.append(length)
    return tuple(failures)


class StopMatcher:
    """Finds stop strings in one stream: the string that is complete first wins, of two that end
    together the longer one.

    Text that is passed on has no character of a stop string that is still possible; text that is
    held back is shorter than the longest stop string. The result does not depend on how the text
    was cut into pieces.
    """

    __slots__ = ("_held", "_matched", "_stops", "hit")

    def __init__(self, stops: Stops) -> None:
        self._stops = stops
        self._matched = [0] * len(stops.strings)
        self._held = ""
        self.hit: str | None = None
        """The stop string that ended the stream."""

    def push(self, text: str) -> str:
        """Text that may be delivered now. Nothing more may be pushed after a hit."""
        if not self._held and self._stops.first_characters.search(text) is None:
            return text
        buffer = self._held + text
        for i in range(len(self._held), len(buffer)):
            if self._advance(buffer[i]):
                assert self.hit is not None
                self._held = ""
                return (
                    buffer[: i + 1]
                    if self._stops.include_in_output
                    else buffer[: i + 1 - len(self.hit)]
                )
        certain = len(buffer) - max(self._matched)
        self._held = buffer[certain:]
        return buffer[:certain]

    def _advance(self, char: str) -> bool:
        """Whether a stop string ends with this character."""
        matched = self._matched
        for which, string in enumerate(self._stops.strings):
            length = matched[which]
            while length and char != string[length]:
                length = self._stops.failures[which][length - 1]
            length += char == string[length]
            matched[which] = length
            if length == len(string) and (self.hit is None or length > len(self.hit)):
                self.hit = string
        return self.hit is not None

    def flush(self) -> str:
        """Text that was held back, at the end of the stream."""
        held = self._held
        self._held = ""
        return held
