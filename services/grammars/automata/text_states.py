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
    _U000,
    _U001,
    _U007,
    _LAST,
    _TWO,
    _E0,
    _ED,
    _F0,
    _F1,
    _F4,
    NUM_TEXT_STATES,
) = range(16)
_REST = range(0x80, 0xC0)
_HEX = b"0123456789abcdefABCDEF"
_PATHS: tuple[tuple[int, int, bytes], ...] = (
    (BETWEEN, _ESCAPE, b"\\"),
    (_ESCAPE, BETWEEN, b'"\\bfnrt'),
    (_ESCAPE, _U, b"u"),
    (_U, _U0, b"0"),
    (_U0, _U00, b"0"),
    (_U00, _U000, b"0"),
    (_U00, _U001, b"1"),
    (_U00, _U007, b"7"),
    (_U000, BETWEEN, _HEX),
    (_U001, BETWEEN, _HEX),
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
_LETTERS = {letter: ord(char) for letter, char in zip(b'"\\bfnrt', '"\\\b\f\n\r\t', strict=True)}
BEYOND_ASCII = 0x80


def char_of_step() -> npt.NDArray[np.int16]:
    """ASCII character that a step of the text completes, `BEYOND_ASCII` for others, -1 where none
    ends [states, classes]."""
    chars = np.full((NUM_TEXT_STATES, NUM_CLASSES), -1, np.int16)
    for byte in range(0x20, 0x7F):
        chars[BETWEEN, CLASS_OF_BYTE[byte]] = byte
    for letter, char in _LETTERS.items():
        chars[_ESCAPE, CLASS_OF_BYTE[letter]] = char
    for state, high in ((_U000, 0x00), (_U001, 0x10)):
        for digit in _HEX:
            chars[state, CLASS_OF_BYTE[digit]] = high + int(chr(digit), 16)
    chars[_U007, classes_of(b"fF")] = 0x7F
    chars[_LAST, classes_of(_REST)] = BEYOND_ASCII
    return np.where(TEXT_STEPS[1] == 1, chars, -1).astype(np.int16)


CHAR_OF_STEP = char_of_step()
