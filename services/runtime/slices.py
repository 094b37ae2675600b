"""Slices of long lists: a native pass over one is short, and other threads run between two."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

SLICE_ENTRIES = 64 * 1024
"""Entries of a slice: 3 ms at 50 ns each."""
EntryT = TypeVar("EntryT")


def slices(entries: Sequence[EntryT]) -> Iterator[Sequence[EntryT]]:
    for start in range(0, len(entries), SLICE_ENTRIES):
        yield entries[start : start + SLICE_ENTRIES]
