"""Builds deterministic automata over bytes from their end to their start: each part is given the
transitions that follow it.

A transition leads to a state, to `DEAD` where the byte is not allowed, or to `LOST` where what comes
next is not followed. Other states may be inexact: they find the end of a part, but allow more than
the grammar does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .byte_classes import CLASS_OF_BYTE, CLASS_SIZES, NUM_CLASSES, classes_of
from .text_states import BETWEEN, CHAR_OF_STEP, NUM_TEXT_STATES, TEXT_STEPS

Int16Array = npt.NDArray[np.int16]
BoolArray = npt.NDArray[np.bool_]
DEAD = -1
LOST = 0
"""State of an answer that the automaton does not follow any further: all bytes lead back to it."""
MAX_STATES = 30_000
MAX_BLANKS = 40
_BLANKS = classes_of(b" \t")
_QUOTE = CLASS_OF_BYTE[ord('"')]


class Unfollowed(Exception):
    """A grammar that no automaton is built for."""


class UnfollowedPart(Exception):
    """A part of a grammar that is not followed."""


@dataclass(frozen=True, slots=True)
class Text:
    """States of the characters of a JSON string between its quotes."""

    start: int
    """State of the beginning. State `start + NUM_TEXT_STATES · n + s` is that of n whole
    characters, and of the state s within the next one."""
    least: int
    """Number of characters before the string may end."""
    most: int | None
    """Largest number of characters; None: any number."""
    end: int
    """State behind the closing quote."""

    @property
    def states(self) -> slice:
        num_counts = 1 + (self.least if self.most is None else self.most)
        return slice(self.start, self.start + num_counts * NUM_TEXT_STATES)


@dataclass(frozen=True, slots=True)
class ByteAutomaton:
    """The start is state `start`."""

    start: int
    steps: Int16Array
    """[states, classes of bytes]."""
    accepts: BoolArray
    """[states]: whether the answer may end here."""
    is_exact: BoolArray
    """[states]: whether the bytes that a state allows are those of the grammar."""
    texts: list[Text]
    """Strings whose states are exact."""


class Builder:
    def __init__(self) -> None:
        self._steps = np.full((1024, NUM_CLASSES), DEAD, np.int16)
        self._num_states = 0
        self._texts: list[Text] = []
        self._inexact = [slice(LOST, LOST + 1)]
        assert self.state(self.lost()) == LOST
        self.end = self.reserve(1)
        """State of a complete answer."""

    def finish(self, row: Int16Array) -> ByteAutomaton:
        """The automaton that begins with these transitions."""
        start = self.state(row)
        accepts = np.zeros(self._num_states, np.bool_)
        accepts[self.end] = True
        is_exact = np.ones(self._num_states, np.bool_)
        for states in self._inexact:
            is_exact[states] = False
        steps = self._steps[: self._num_states]
        return ByteAutomaton(start, steps, accepts, is_exact, self._texts)

    def reserve(self, count: int) -> int:
        """First of some new states, without transitions. Raises `Unfollowed`."""
        first = self._num_states
        self._num_states += count
        if self._num_states > MAX_STATES:
            raise Unfollowed("its automaton has too many states")
        if self._num_states > len(self._steps):
            size = min(MAX_STATES, 2 * self._num_states)
            steps = np.full((size, NUM_CLASSES), DEAD, np.int16)
            steps[:first] = self._steps[:first]
            self._steps = steps
        return first

    def state(self, row: Int16Array) -> int:
        """A new state with these transitions."""
        state = self.reserve(1)
        self._steps[state] = row
        return state

    def fill(self, state: int, row: Int16Array) -> None:
        """Gives a reserved state its transitions."""
        self._steps[state] = row

    def lost(self) -> Int16Array:
        """Transitions to `LOST`."""
        return np.full(NUM_CLASSES, LOST, np.int16)

    def byte(self, byte: int, state: int) -> Int16Array:
        """Transitions of one byte."""
        row = nothing()
        row[CLASS_OF_BYTE[byte]] = state
        return row

    def literals(self, rests: Mapping[bytes, int | Int16Array]) -> Int16Array:
        """Transitions of one of some literals, none empty, each with the state or the transitions
        behind it. Before a byte that shares its class with others a state is inexact. Raises
        `UnfollowedPart` where literals differ in such bytes."""
        row = nothing()
        by_first: dict[int, dict[bytes, int | Int16Array]] = {}
        for literal, rest in rests.items():
            by_first.setdefault(literal[0], {})[literal[1:]] = rest
        if len({int(CLASS_OF_BYTE[first]) for first in by_first}) < len(by_first):
            raise UnfollowedPart
        for first, tails in by_first.items():
            row[CLASS_OF_BYTE[first]] = self._behind(tails)
        return row

    def _behind(self, tails: dict[bytes, int | Int16Array]) -> int:
        whole = tails.pop(b"", None)
        if not tails and isinstance(whole, int):
            return whole
        row = self.literals(tails)
        if whole is not None:
            row = either(row, self._steps[whole] if isinstance(whole, int) else whole)
        state = self.state(row)
        if any(CLASS_SIZES[CLASS_OF_BYTE[tail[0]]] > 1 for tail in tails):
            self._inexact.append(slice(state, state + 1))
        return state

    def spaced(self, row: Int16Array) -> Int16Array:
        """Transitions of optional white space, `(\\r?\\n)?[ \\t]{0,40}`, before these."""
        first = self.reserve(MAX_BLANKS + 2)
        blank = self._steps[first : first + MAX_BLANKS + 1]
        blank[:] = row
        states = np.arange(first + 1, first + MAX_BLANKS + 1)
        blank[:-1, _BLANKS] = states[:, None]
        feed = first + MAX_BLANKS + 1
        self.fill(feed, self.byte(ord("\n"), first))
        start: Int16Array = blank[0].copy()
        start[CLASS_OF_BYTE[ord("\n")]] = first
        start[CLASS_OF_BYTE[ord("\r")]] = feed
        return start

    def text(self, least: int, most: int | None, end: int, *, is_exact: bool) -> int:
        """State behind the opening quote of a string. `is_exact`: all texts of such a length are
        allowed."""
        num_counts = 1 + (least if most is None else most)
        first = self.reserve(num_counts * NUM_TEXT_STATES)
        counts = np.arange(num_counts)
        after = counts + 1
        if most is None:
            after[-1] = num_counts - 1
        block = self._steps[first : first + num_counts * NUM_TEXT_STATES].reshape(
            num_counts, NUM_TEXT_STATES, NUM_CLASSES
        )
        steps, num_chars = TEXT_STEPS
        of_count = np.stack([counts, after])[num_chars[None].clip(0, 1), counts[:, None, None]]
        block[:] = np.where(
            steps[None] == DEAD, DEAD, first + of_count * NUM_TEXT_STATES + steps[None]
        )
        if most is not None:
            block[-1] = DEAD
        block[least:, 0, _QUOTE] = end
        text = Text(first, least, most, end)
        if is_exact:
            self._texts.append(text)
        else:
            self._inexact.append(text.states)
        return first

    def pattern(self, steps: Int16Array, ends: BoolArray, end: int) -> int:
        """State behind the opening quote of a string whose characters take these steps [states,
        characters], and which may end in some of the states."""
        first = self.reserve(len(steps) * NUM_TEXT_STATES)
        block = self._steps[first : first + len(steps) * NUM_TEXT_STATES].reshape(
            len(steps), NUM_TEXT_STATES, NUM_CLASSES
        )
        within, num_chars = TEXT_STEPS
        goes_on = (within != DEAD) & (num_chars == 0)
        starts = first + np.arange(len(steps))[:, None, None] * NUM_TEXT_STATES
        after = steps[:, CHAR_OF_STEP]
        block[:] = np.where(goes_on, starts + within, DEAD)
        ends_char = (num_chars == 1) & (after != DEAD)
        block[ends_char] = first + after[ends_char] * NUM_TEXT_STATES
        # Beginnings of characters that the pattern does not have lead nowhere.
        for _ in range(NUM_TEXT_STATES):
            is_dead = (block == DEAD).all(axis=2) & (np.arange(NUM_TEXT_STATES) != BETWEEN)
            dead = first + np.flatnonzero(is_dead)
            block[np.isin(block, dead)] = DEAD
        block[ends, BETWEEN, _QUOTE] = end
        return first

    def embed(
        self, steps: Int16Array, accepts: BoolArray, row: Int16Array, *, is_exact: bool
    ) -> Int16Array:
        """Transitions of an automaton of its own, [states, classes] with its start first, before
        these."""
        first = self.reserve(len(steps))
        if not is_exact:
            self._inexact.append(slice(first, first + len(steps)))
        ours = np.where(steps == DEAD, DEAD, steps + first).astype(np.int16)
        for state in np.flatnonzero(accepts):
            ours[state] = either(ours[state], row)
        self._steps[first : first + len(steps)] = ours
        start: Int16Array = ours[0]
        return start


def nothing() -> Int16Array:
    """Transitions of no byte at all."""
    return np.full(NUM_CLASSES, DEAD, np.int16)


def either(row: Int16Array, other: Int16Array) -> Int16Array:
    """Transitions of one or the other. Raises `UnfollowedPart` where a byte does not tell them
    apart."""
    if ((row >= 0) & (other >= 0) & (row != other)).any():
        raise UnfollowedPart
    merged: Int16Array = np.maximum(row, other)
    return merged
