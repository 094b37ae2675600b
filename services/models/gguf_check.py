"""Checks from the header alone whether a GGUF file can hold what its header claims, before it is
read.

A reader allocates lists of the claimed lengths, so the claims are checked against the size of the
file.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

import gguf

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_KEYS = 65_536
MAX_TENSORS = 65_536
MAX_NAME_BYTES = 65_535
MAX_ITEMS = 1 << 22
"""Largest number of items of all arrays, several times that of any vocabulary: a reader takes 700
to 1,600 bytes for each, however small it is in the file."""
MAX_DIMENSIONS = 4
MAX_ELEMENTS_PER_BYTE = 8
"""Largest number of a tensor's elements in a byte: no kind of weights takes less than a bit."""
STRING = 8
ARRAY = 9
SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Size of a value in bytes, by the number of its type."""
QUANT_SIZES = {kind.value: sizes for kind, sizes in gguf.GGML_QUANT_SIZES.items()}
"""Numbers of elements and bytes in a block, by the number of the type."""


class GgufFileError(Exception):
    """A file that is no GGUF file, or claims to hold more than it does."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{path} cannot be read: {reason}")
        self.path = path
        self.reason = reason


def check_gguf(path: Path) -> None:
    """Checks a file. Raises `GgufFileError`, `OSError`."""
    with path.open("rb") as file:
        header = _Header(path, file)
        if header.take(4) != MAGIC:
            raise header.fault("it is no GGUF file")
        if (version := header.number("I")) not in VERSIONS:
            raise header.fault(f"its version is {version}; allowed: {VERSIONS}")
        num_tensors = header.count("tensors", MAX_TENSORS)
        for _ in range(header.count("keys", MAX_KEYS)):
            header.skip_key()
        ends = dict(header.tensor_end() for _ in range(num_tensors))
        header.check_ends(ends)


class _Header:
    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path = path
        self._file = file
        self._size = path.stat().st_size
        self._num_items = 0

    def fault(self, reason: str) -> GgufFileError:
        return GgufFileError(self._path, reason)

    def take(self, num_bytes: int) -> bytes:
        taken = self._file.read(self._within(num_bytes))
        if len(taken) < num_bytes:
            raise self.fault("it is cut off")
        return taken

    def skip(self, num_bytes: int) -> None:
        self._file.seek(self._within(num_bytes), 1)

    def number(self, form: str) -> int:
        value: int = struct.unpack(f"<{form}", self.take(struct.calcsize(form)))[0]
        return value

    def count(self, what: str, most: int) -> int:
        count = self.number("Q")
        if count > most:
            raise self.fault(f"it has {count} {what}; allowed: at most {most}")
        return count

    def skip_key(self) -> None:
        self.skip(self.count("bytes of a key", MAX_NAME_BYTES))
        kind = self.number("I")
        if kind != ARRAY:
            self._skip_values(kind, 1)
            return
        item_kind = self.number("I")
        self._skip_values(item_kind, self.number("Q"))

    def tensor_end(self) -> tuple[str, int]:
        """Name of a tensor, and its end, counted from the end of the header."""
        name = self.take(self.count("bytes of a tensor's name", MAX_NAME_BYTES)).decode(
            errors="replace"
        )
        num_dimensions = self.number("I")
        if num_dimensions > MAX_DIMENSIONS:
            raise self.fault(
                f"a tensor has {num_dimensions} dimensions; allowed: at most {MAX_DIMENSIONS}"
            )
        num_elements = math.prod(self.number("Q") for _ in range(num_dimensions))
        if not 1 <= num_elements <= MAX_ELEMENTS_PER_BYTE * self._size:
            raise self.fault(
                f"a tensor has {num_elements} elements, which are not in its {self._size} bytes"
            )
        kind = self.number("I")
        begin = self.number("Q")
        if begin > self._size:
            raise self.fault(f"the tensor {name} begins behind its end")
        # Tensors of a kind without size are refused by their kind later.
        per_block, num_bytes = QUANT_SIZES.get(kind, (1, 0))
        return name, begin + num_elements // per_block * num_bytes

    def check_ends(self, ends: Mapping[str, int]) -> None:
        """Raises `GgufFileError` for the first tensor that ends behind the file."""
        rest = self._size - self._file.tell()
        cut_off = [name for name, end in ends.items() if end > rest]
        if cut_off:
            name = min(cut_off, key=ends.__getitem__)
            raise self.fault(f"the tensor {name} is cut off: {ends[name] - rest} bytes are missing")

    def _skip_values(self, kind: int, count: int) -> None:
        if kind != STRING and kind not in SIZES:
            raise self.fault(
                f"a value is of type {kind}; allowed: {[*SIZES, STRING]}, or an array of these"
            )
        # A string has its length before it.
        self._within(SIZES.get(kind, 8) * count)
        self._num_items += count
        if self._num_items > MAX_ITEMS:
            raise self.fault(
                f"its arrays have {self._num_items} items; allowed: at most {MAX_ITEMS}"
            )
        if kind != STRING:
            self.skip(SIZES[kind] * count)
            return
        for _ in range(count):
            self.skip(self.number("Q"))

    def _within(self, num_bytes: int) -> int:
        """Returns the number of bytes, checked against the rest of the file."""
        if num_bytes > self._size - self._file.tell():
            raise self.fault(
                f"{num_bytes} bytes are announced and {self._size - self._file.tell()} are there"
            )
        return num_bytes
