"""Deterministic automata of the patterns of strings, over characters."""

from __future__ import annotations

import numpy as np

from ..name_pattern import name_pattern
from .builder import DEAD, BoolArray, Int16Array, UnfollowedPart

MAX_STATES = 64
OTHERS = 0x80
"""Any character beyond ASCII."""
_CHARS = "".join(map(chr, range(OTHERS + 1)))
_LAST_CHAR = 0x10FFFF


def pattern_steps(expression: str, most_work: int) -> tuple[Int16Array, BoolArray, int]:
    """Steps [states, characters] of the texts in which a pattern is found, the start first, and the
    states in which a text may end, and the work that it took: steps of the expression's states.
    Raises `UnfollowedPart` for other syntax than the common one, for many states or more work than
    `most_work`, and where some characters beyond ASCII match and others do not."""
    pattern = name_pattern(expression)
    if pattern is None or pattern.tells_apart(OTHERS, _LAST_CHAR):
        raise UnfollowedPart
    # llguidance allows the escapes of these two also where a class leaves the characters out.
    if pattern.excludes('"') or pattern.excludes("\\"):
        raise UnfollowedPart
    kinds = dict[tuple[bool, ...], str]()
    kind_of = [
        kinds.setdefault(alike, char)
        for char, alike in zip(_CHARS, pattern.alike(_CHARS), strict=True)
    ]
    # What follows the start of a text differs from what follows the same states later.
    start = (True, pattern.start)
    numbers = {start: 0}
    order = [start]
    steps = np.full((MAX_STATES, OTHERS + 1), DEAD, np.int16)
    work = 0
    for number, (is_first, states) in enumerate(order):
        work += len(states) * len(kinds)
        after = {
            char: (False, pattern.after(states, char, is_first=is_first)) for char in kinds.values()
        }
        for each in after.values():
            if each not in numbers:
                numbers[each] = len(order)
                order.append(each)
        if len(order) > MAX_STATES or work > most_work:
            raise UnfollowedPart
        steps[number] = [numbers[after[char]] for char in kind_of]
    ends = np.array([pattern.may_end(states, is_empty=is_first) for is_first, states in order])
    steps = steps[: len(order)]
    return np.where(_lead_to(ends, steps)[steps], steps, DEAD).astype(np.int16), ends, work


def _lead_to(ends: BoolArray, steps: Int16Array) -> BoolArray:
    """Which states lead to one of the ends."""
    found = ends
    while not np.array_equal(more := found | found[steps].any(axis=1), found):
        found = more
    return found
