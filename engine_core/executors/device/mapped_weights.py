"""Weights of a CPU's engine as memory that sleep gives back: pages of files that the process has
mapped. The system keeps them as long as it has room, and they come back from there or from disk.

Knows files and pages; knows no tensors.
"""

from __future__ import annotations

import ctypes
import mmap
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

SMAPS = Path("/proc/self/smaps")
POPULATE_READ = 22
"""MADV_POPULATE_READ, since Linux 5.14: Python has no name for it."""
_HEAD = re.compile(r"([0-9a-f]+)-([0-9a-f]+) \S+ [0-9a-f]+ \S+ \d+ +(/.*)")


@dataclass(slots=True)
class Mapping:
    """Pages of a file, in bytes."""

    start: int
    end: int
    path: str
    num_resident: int = 0
    num_changed: int = 0
    """Bytes of pages that were written to: they are no longer the file's. NOTE: `Private_Dirty`
    counts pages of a file that was written a moment ago as well."""


class MappedWeights:
    """See `ReleasableMemory`. On a CPU the KV cache is host memory."""

    keeps_cache = True

    def __init__(self, folders: Sequence[Path]) -> None:
        """`folders`: folders of the models that the engine computes, whose files are mapped."""
        self._folders = tuple(folder.resolve() for folder in folders)
        self._released: list[Mapping] = []
        self.num_bytes = sum(each.end - each.start for each in self._clean())

    def follow(self, folder: Path) -> None:
        """Notes that the weights of `folder` have replaced all others, whose pages are released."""
        is_released = bool(self._released)
        self._folders = (folder.resolve(),)
        self._released = []
        self.num_bytes = sum(each.end - each.start for each in self._clean())
        if is_released:
            self.release()

    def release(self) -> int:
        # A page that was written to would come back as the file has it.
        self._released = self._clean()
        for each in self._released:
            _advise(each, mmap.MADV_DONTNEED)
        return sum(each.num_resident for each in self._released)

    def restore(self) -> None:
        for each in self._released:
            if not _advise(each, POPULATE_READ):
                # Older systems read ahead, and steps wait for what is not there yet.
                _advise(each, mmap.MADV_WILLNEED)
        self._released = []

    def _clean(self) -> list[Mapping]:
        found = mappings_of(SMAPS.read_text())
        return [each for each in found if not each.num_changed and self._is_ours(each.path)]

    def _is_ours(self, path: str) -> bool:
        return any(Path(path).is_relative_to(folder) for folder in self._folders)


def mappings_of(smaps: str) -> Iterator[Mapping]:
    """Mapped files of a process, as /proc/PID/smaps lists them."""
    mapping: Mapping | None = None
    for line in smaps.splitlines():
        name, _, value = line.partition(":")
        if " " in name:
            if mapping is not None:
                yield mapping
            head = _HEAD.fullmatch(line)
            mapping = head and Mapping(int(head[1], 16), int(head[2], 16), head[3])
        elif mapping is not None and name == "Rss":
            mapping.num_resident = _bytes(value)
        elif mapping is not None and name in ("Anonymous", "Swap"):
            mapping.num_changed += _bytes(value)
    if mapping is not None:
        yield mapping


def _bytes(value: str) -> int:
    return int(value.split(maxsplit=1)[0]) << 10


def _advise(mapping: Mapping, advice: int) -> bool:
    """Whether the system took the advice."""
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    length = mapping.end - mapping.start
    code = madvise(ctypes.c_void_p(mapping.start), ctypes.c_size_t(length), ctypes.c_int(advice))
    return int(code) == 0
