"""Regular expressions of `patternProperties` against the names that a schema declares: which they
match, and whether they match any other.

Reads the common syntax only, in time linear in expression and names: these come from clients, and
the work is done in a process that serves others.
"""

from __future__ import annotations

import functools
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

MAX_CHARS = 512
MAX_STATES = 2_000
_ATOM = re.compile(
    r"""\\(?:x(?P<hex>[0-9a-fA-F]{2})|[xu]\{(?P<braced>[0-9a-fA-F]{1,6})\}|u(?P<four>[0-9a-fA-F]{4})
    |(?P<class>[dwDW])|(?P<letter>[tnrfv])|(?P<sign>[^0-9A-Za-z<>]))
    |(?P<plain>[^\\])""",
    re.VERBOSE | re.DOTALL,
)
_REPEAT = re.compile(r"(?:(?P<sign>[*+?])|\{(?P<least>\d{1,4})(?P<most>,\d{0,4})?\})\??")
_LETTERS = {"t": "\t", "n": "\n", "r": "\r", "f": "\f", "v": "\v"}
_DIGITS = ((0x30, 0x39),)
_WORD = (*_DIGITS, (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))


class _NotRead(Exception):
    """Raised for syntax beyond the common one."""


@dataclass(frozen=True, slots=True)
class _Chars:
    """A class of characters: ranges of code points, or all others."""

    ranges: tuple[tuple[int, int], ...]
    is_negated: bool = False

    def has(self, char: str) -> bool:
        return any(low <= ord(char) <= high for low, high in self.ranges) != self.is_negated

    def has_others(self, chars: Collection[str]) -> bool:
        """Whether there are characters beyond these."""
        if self.is_negated:
            return True
        size = sum(high - low + 1 for low, high in self.ranges)
        return size > sum(map(self.has, chars))


_ANY = _Chars((), is_negated=True)
_NO_NEWLINE = _Chars(((0x0A, 0x0A),), is_negated=True)


@dataclass(slots=True)
class _Automaton:
    """States and the edges between them. An edge without characters is free; `^` and `$` are free
    at the ends of a name."""

    steps: list[list[tuple[_Chars, int]]] = field(default_factory=list)
    jumps: list[list[tuple[str, int]]] = field(default_factory=list)

    def state(self) -> int:
        if len(self.steps) == MAX_STATES:
            raise _NotRead
        self.steps.append([])
        self.jumps.append([])
        return len(self.steps) - 1

    def reach(self, states: Iterable[int], *, signs: Collection[str]) -> frozenset[int]:
        """The states, and those that free edges lead to."""
        waiting = list(states)
        found = set(waiting)
        while waiting:
            for sign, after in self.jumps[waiting.pop()]:
                if after not in found and (not sign or sign in signs):
                    found.add(after)
                    waiting.append(after)
        return frozenset(found)

    def step(self, states: Iterable[int], char: str) -> set[int]:
        return {after for state in states for chars, after in self.steps[state] if chars.has(char)}


_Build = Callable[[_Automaton, int], int]
"""Adds an expression behind a state, and returns the state after it."""


class Names:
    """Names that begin alike."""

    def __init__(self, names: Collection[str], length: int = 0) -> None:
        """`length` is the number of leading characters that all names of these states share, as far
        as they were compared."""
        self._names = names
        self.length = length

    @functools.cached_property
    def whole(self) -> str | None:
        """The name that has no more characters."""
        return next((name for name in self._names if len(name) == self.length), None)

    @functools.cached_property
    def longer(self) -> dict[str, Names]:
        """The others, by their next character."""
        by_char = defaultdict[str, list[str]](list)
        for name in self._names:
            if len(name) > self.length:
                by_char[name[self.length]].append(name)
        return {char: Names(those, self.length + 1) for char, those in by_char.items()}


class NamePattern:
    """An expression that is looked for anywhere in a name."""

    def __init__(self, expression: str) -> None:
        """Raises `_NotRead`."""
        self._automaton = _Automaton()
        self._start = self._automaton.state()
        self._automaton.steps[self._start].append((_ANY, self._start))
        self._end = _Parser(expression).whole()(self._automaton, self._start)
        self._automaton.steps[self._end].append((_ANY, self._end))

    def matches(self, name: str) -> bool:
        states = {self._start}
        for i, char in enumerate(name):
            reached = self._automaton.reach(states, signs="" if i else "^")
            states = self._automaton.step(reached, char)
        return self._is_end(states, name)

    def only_names(self, names: Names) -> list[str] | None:
        """The given names that the pattern matches; None if it also matches other names."""
        matched = list[str]()
        # Names with a common beginning, with the states after it.
        waiting: list[tuple[Names, Collection[int]]] = [(names, {self._start})]
        while waiting:
            alike, states = waiting.pop()
            begin = "" if alike.length else "^"
            if self._end in self._automaton.reach(states, signs=begin + "$"):
                if alike.whole is None:
                    return None
                matched.append(alike.whole)
            reached = self._automaton.reach(states, signs=begin)
            if self._goes_on(reached, alike.longer):
                return None
            for char, those in alike.longer.items():
                if after := self._automaton.step(reached, char):
                    waiting.append((those, after))
        return matched

    def _goes_on(self, states: Iterable[int], chars: Collection[str]) -> bool:
        """Whether other characters than these lead on to the end."""
        return any(
            after in self._useful and others.has_others(chars)
            for state in states
            for others, after in self._automaton.steps[state]
        )

    @functools.cached_property
    def _useful(self) -> frozenset[int]:
        """States from which the end can be reached, other than by `^` behind a character."""
        before: dict[int, list[int]] = {}
        for state, (steps, jumps) in enumerate(
            zip(self._automaton.steps, self._automaton.jumps, strict=True)
        ):
            after = [each for _, each in steps] + [each for sign, each in jumps if sign != "^"]
            for each in after:
                before.setdefault(each, []).append(state)
        waiting = [self._end]
        found = {self._end}
        while waiting:
            for state in before.get(waiting.pop(), []):
                if state not in found:
                    found.add(state)
                    waiting.append(state)
        return frozenset(found)

    def _is_end(self, states: Iterable[int], name: str) -> bool:
        return self._end in self._automaton.reach(states, signs="$" if name else "^$")


def name_pattern(expression: str) -> NamePattern | None:
    """The expression; None for one that is long or has uncommon syntax."""
    if len(expression) > MAX_CHARS:
        return None
    try:
        return NamePattern(expression)
    except (_NotRead, RecursionError):
        return None


class _Parser:
    def __init__(self, expression: str) -> None:
        self._text = expression
        self._at = 0

    def whole(self) -> _Build:
        built = self._either()
        if self._at < len(self._text):
            raise _NotRead
        return built

    def _either(self) -> _Build:
        members = [self._sequence()]
        while self._take("|"):
            members.append(self._sequence())
        return functools.partial(_add_either, members)

    def _sequence(self) -> _Build:
        parts = list[_Build]()
        while self._at < len(self._text) and self._text[self._at] not in "|)":
            parts.append(self._repeated(self._one()))
        return functools.partial(_add_sequence, parts)

    def _repeated(self, one: _Build) -> _Build:
        found = _REPEAT.match(self._text, self._at)
        if found is None:
            return one
        self._at = found.end()
        if found["sign"]:
            least, most = {"*": (0, None), "+": (1, None), "?": (0, 1)}[found["sign"]]
        else:
            least = int(found["least"])
            last = (found["most"] or f",{least}")[1:]
            most = int(last) if last else None
        if _REPEAT.match(self._text, self._at) or (most is not None and most < least):
            raise _NotRead
        return functools.partial(_add_repeated, one, least, most)

    def _one(self) -> _Build:
        if self._take("("):
            if self._is_at("?") and not self._take("?:"):
                raise _NotRead
            inner = self._either()
            self._expect(")")
            return inner
        for sign in "^$":
            if self._take(sign):
                return functools.partial(_add_jump, sign)
        if self._take("["):
            return functools.partial(_add_step, self._class())
        if self._take("."):
            return functools.partial(_add_step, _NO_NEWLINE)
        return functools.partial(_add_step, self._atom(forbidden="*+?{)"))

    def _class(self) -> _Chars:
        """A class behind its opening bracket."""
        is_negated = self._take("^")
        ranges = list[tuple[int, int]]()
        while not self._is_at("]"):
            if self._text[self._at : self._at + 2] in ("&&", "--", "~~"):
                raise _NotRead
            ranges += self._range()
        self._expect("]")
        # An expression with a bracket right behind the opening one means the bracket.
        if not ranges:
            raise _NotRead
        return _Chars(_apart(ranges), is_negated)

    def _range(self) -> tuple[tuple[int, int], ...]:
        first = self._atom(forbidden="[")
        if first.is_negated:
            raise _NotRead
        if not self._is_at("-") or self._is_at("-]"):
            return first.ranges
        self._expect("-")
        last = self._atom(forbidden="[")
        low = first.ranges[0][0]
        high = last.ranges[0][1]
        if last.is_negated or len(first.ranges) + len(last.ranges) > 2 or low > high:
            raise _NotRead
        return ((low, high),)

    def _atom(self, *, forbidden: str) -> _Chars:
        """One character, or an escape. `forbidden` are characters with a meaning at this place."""
        found = _ATOM.match(self._text, self._at)
        if found is None or (found["plain"] or " ") in forbidden:
            raise _NotRead
        self._at = found.end()
        if letter := found["class"]:
            return _Chars(_DIGITS if letter in "dD" else _WORD, letter.isupper())
        if code := found["hex"] or found["braced"] or found["four"]:
            point = int(code, 16)
        else:
            point = ord(_LETTERS.get(found["letter"]) or found["sign"] or found["plain"])
        return _Chars(((point, point),))

    def _expect(self, text: str) -> None:
        if not self._take(text):
            raise _NotRead

    def _take(self, text: str) -> bool:
        if not self._is_at(text):
            return False
        self._at += len(text)
        return True

    def _is_at(self, text: str) -> bool:
        return self._text.startswith(text, self._at)


def _apart(ranges: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """The ranges without what they have in common."""
    joined = list[tuple[int, int]]()
    for low, high in sorted(ranges):
        if joined and low <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(high, joined[-1][1])
        else:
            joined.append((low, high))
    return tuple(joined)


def _add_step(chars: _Chars, automaton: _Automaton, start: int) -> int:
    end = automaton.state()
    automaton.steps[start].append((chars, end))
    return end


def _add_jump(sign: str, automaton: _Automaton, start: int) -> int:
    end = automaton.state()
    automaton.jumps[start].append((sign, end))
    return end


def _add_sequence(parts: Sequence[_Build], automaton: _Automaton, start: int) -> int:
    for part in parts:
        start = part(automaton, start)
    return start


def _add_either(members: Sequence[_Build], automaton: _Automaton, start: int) -> int:
    end = automaton.state()
    for member in members:
        automaton.jumps[member(automaton, _add_jump("", automaton, start))].append(("", end))
    return end


def _add_repeated(
    one: _Build, least: int, most: int | None, automaton: _Automaton, start: int
) -> int:
    for _ in range(least):
        start = one(automaton, start)
    if most is None:
        loop = _add_jump("", automaton, start)
        automaton.jumps[one(automaton, loop)].append(("", loop))
        return _add_jump("", automaton, loop)
    end = automaton.state()
    automaton.jumps[start].append(("", end))
    for _ in range(most - least):
        start = one(automaton, start)
        automaton.jumps[start].append(("", end))
    return end
