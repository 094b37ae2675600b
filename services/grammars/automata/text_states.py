"""The automaton of the characters of a JSON string.

A character is a whole one of UTF-8, or an escape: `\\"`, `\\\\`, `\\b`, `\\f`, `\\n`, `\\r`, `\\t`, and
`\\u00XX` of a control character.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .byte_classes import CLASS_OF_BYTE, NUM_CLASSES, classes_of

(
    BETWEEN,
    _ESCAPE,
    _U,
    _U0,
    _U00,
    _U00X,
    _U007,
    _LAST,
    _TWO,
    _E0,
    _ED,
    _F0,
    _F1,
    _F4,
    NUM_TEXT_STATES,
) = range(15)
_REST = range(0x80, 0xC0)
_PATHS: tuple[tuple[int, int, bytes], ...] = (
    (BETWEEN, _ESCAPE, b"\\"),
    (_ESCAPE, BETWEEN, b'"\\bfnrt'),
    (_ESCAPE, _U, b"u"),
    (_U, _U0, b"0"),
    (_U0, _U00, b"0"),
    (_U00, _U00X, b"01"),
    (_U00, _U007, b"7"),
    (_U00X, BETWEEN, b"0123456789abcdefABCDEF"),
    (_U007, BETWEEN, b"fF"),
    (BETWEEN, BETWEEN, bytes({*range(0x20, 0x7F)} - {*b'"\\'})),
    (BETWEEN, _LAST, bytes(range(0xC2, 0xE0))),
    (BETWEEN, _E0, b"\xe0"),
    (BETWEEN, _TWO, bytes({*range(0xE1, 0xF0)} - {0xED})),
    (BETWEEN, _ED, b"\xed"),
    (BETWEEN, _F0, b"\xf0"),
    (BETWEEN, _F1, b"\xf1\xf2\xf3"),
    (BETWEEN, _F4, b"\xf4"),
    (_E0, _LAST, bytes(range(0xA0, 0xC0))),
    (_ED, _LAST, bytes(range(0x80, 0xA0))),
    (_F0, _TWO, bytes(range(0x90, 0xC0))),
    (_F1, _TWO, bytes(_REST)),
    (_F4, _TWO, bytes(range(0x80, 0x90))),
    (_TWO, _LAST, bytes(_REST)),
    (_LAST, BETWEEN, bytes(_REST)),
)
"""State before, state after, and the bytes between."""


def _text_steps() -> tuple[npt.NDArray[np.int16], npt.NDArray[np.int16]]:
    steps = np.full((NUM_TEXT_STATES, NUM_CLASSES), -1, np.int16)
    num_chars = np.zeros_like(steps)
    for before, after, some in _PATHS:
        classes = classes_of(some)
        steps[before, classes] = after
        num_chars[before, classes] = after == BETWEEN
    return steps, num_chars


TEXT_STEPS = _text_steps()
"""State after each class of bytes [states, classes], -1 where it is not allowed, and the number of
characters that it completes. The closing quote is not among them."""
QUOTE = int(CLASS_OF_BYTE[ord('"')])
