"""Automata of JSON's numbers."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import numpy as np

from .builder import DEAD, BoolArray, Int16Array
from .byte_classes import CLASS_OF_BYTE, NUM_CLASSES

_DIGITS = b"0123456789"
_NUMBER: dict[str, tuple[tuple[bytes, str], ...]] = {
    "start": ((b"-", "minus"), (b"0", "zero"), (b"123456789", "whole")),
    "minus": ((b"0", "zero"), (b"123456789", "whole")),
    "zero": ((b".", "point"), (b"eE", "exponent")),
    "whole": ((_DIGITS, "whole"), (b".", "point"), (b"eE", "exponent")),
    "point": ((_DIGITS, "fraction"),),
    "fraction": ((_DIGITS, "fraction"), (b"eE", "exponent")),
    "exponent": ((b"+-", "signed"), (_DIGITS, "power")),
    "signed": ((_DIGITS, "power"),),
    "power": ((_DIGITS, "power"),),
}
_WHOLE = ("zero", "whole", "fraction", "power")
Interval = tuple[str, str | None]
"""Digits that are left, all strings between two of the same length; with None at least as many
digits as the first one has."""
Table = tuple[Int16Array, BoolArray]
"""Steps [states, classes], the start first, and which states end a number."""


def explored(
    start: Hashable, steps_of: Callable[[Hashable], dict[int, Hashable]], ends: Callable[..., bool]
) -> Table:
    """Table of all states that are reached from the start."""
    numbers = {start: 0}
    rows = list[Int16Array]()
    for state in (order := [start]):
        row = np.full(NUM_CLASSES, DEAD, np.int16)
        for byte, after in steps_of(state).items():
            if after not in numbers:
                numbers[after] = len(numbers)
                order.append(after)
            row[CLASS_OF_BYTE[byte]] = numbers[after]
        rows.append(row)
    return np.stack(rows), np.array([ends(state) for state in order])


NUMBER = explored(
    "start",
    lambda state: {byte: after for some, after in _NUMBER[str(state)] for byte in some},
    lambda state: state in _WHOLE,
)
"""Any number."""


def integer(least: int | None, most: int | None) -> Table:
    """Integers from `least` to `most`; None: no bound."""
    positive = _intervals(max(0, least or 0), most) if most is None or most >= 0 else frozenset()
    negative: frozenset[Interval] = frozenset()
    if least is None or least < 0:
        # Between bounds on both sides of zero llguidance has the range of negative ones from 0.
        is_open = least is None and most is None
        is_across = least is not None and most is not None and most >= 0
        smallest = 0 if is_open or is_across else 1
        if most is not None and most < 0:
            smallest = -most
        negative = _intervals(smallest, None if least is None else -least)

    def steps_of(state: Hashable) -> dict[int, Hashable]:
        if state == "start":
            signed: dict[int, Hashable] = {ord("-"): negative} if negative else {}
            return signed | _digits(positive)
        assert isinstance(state, frozenset)
        return _digits(state)

    return explored(
        "start", steps_of, lambda state: state != "start" and any(not low for low, _ in state)
    )


def _intervals(least: int, most: int | None) -> frozenset[Interval]:
    """Digits of the integers in a range that is not negative."""
    found = list[Interval]()
    last = max(len(str(least)), len(str(most)) if most is not None else len(str(least)) + 1)
    for length in range(len(str(least)), last + 1):
        low = max(least, 10 ** (length - 1) if length > 1 else 0)
        if most is None and length == last:
            found.append((str(low), None))
        elif (high := min(10**length - 1, most if most is not None else 10**length)) >= low:
            found.append((str(low), str(high)))
    return frozenset(found)


def _digits(left: frozenset[Interval]) -> dict[int, Hashable]:
    after: dict[int, set[Interval]] = {}
    for low, high in left:
        if high is None:
            # The first digit is not zero, the others are free.
            least = 1 if low.startswith("1") else 0
            for digit in range(least, 10):
                after.setdefault(digit, set()).add((low[1:].replace("1", "0"), None))
        elif low:
            first, last = int(low[0]), int(high[0])
            for digit in range(first, last + 1):
                after.setdefault(digit, set()).add(
                    (
                        low[1:] if digit == first else "0" * len(low[1:]),
                        high[1:] if digit == last else "9" * len(low[1:]),
                    )
                )
    return {ord(str(digit)): frozenset(some) for digit, some in after.items()}
