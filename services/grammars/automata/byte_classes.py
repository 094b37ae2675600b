"""Classes of bytes that no automaton of a JSON text tells apart."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

_GROUPS = (
    (0x80, 0x8F),
    (0x90, 0x9F),
    (0xA0, 0xBF),
    (0xC2, 0xDF),
    (0xE0, 0xE0),
    (0xED, 0xED),
    (0xE1, 0xEF),
    (0xF0, 0xF0),
    (0xF1, 0xF3),
    (0xF4, 0xF4),
)
"""Bytes of UTF-8 beyond ASCII: continuations by the ranges that some first byte demands, and first
bytes by what may follow them."""
_SINGLE = (*b"\t\n\r", *range(0x20, 0x7F))
"""Bytes that are a class of their own."""


def _class_of_bytes() -> npt.NDArray[np.uint8]:
    """Class of each byte, uint8 [256]; class 0 has the bytes that no JSON text contains."""
    of_bytes = np.zeros(256, np.uint8)
    for number, (first, last) in reversed(list(enumerate(_GROUPS, start=1))):
        of_bytes[first : last + 1] = number
    of_bytes[list(_SINGLE)] = np.arange(len(_SINGLE)) + len(_GROUPS) + 1
    return of_bytes


CLASS_OF_BYTE = _class_of_bytes()
NUM_CLASSES = int(CLASS_OF_BYTE.max()) + 1
CLASS_SIZES = np.bincount(CLASS_OF_BYTE, minlength=NUM_CLASSES)
"""Number of bytes in each class."""


def classes_of(some: Iterable[int]) -> npt.NDArray[np.intp]:
    """The classes of these bytes, each once, in order."""
    return np.unique(CLASS_OF_BYTE[list(some)]).astype(np.intp)
