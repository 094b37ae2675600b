"""Locks that outlive their memory are found, by a runtime that stands in for CUDA's."""

from __future__ import annotations

import mmap
from pathlib import Path
from types import SimpleNamespace

import pytest

from headwater.bench.pytest_locks import LockTable, covers, mappings

PAGE = mmap.PAGESIZE
MAPS = """\
00400000-00402000 r-xp 00000000 fe:00 79246      /usr/bin/python3
00402000-00404000 rw-p 00000000 00:00 0
00500000-00501000 rw-s 00000000 00:01 26         /dev/zero (deleted)
"""


class Runtime:
    """CUDA's, which keeps locks in a table of its own."""

    cudaError = SimpleNamespace(success=0)  # noqa: N815  # CUDA's name

    def __init__(self) -> None:
        self.locked: set[int] = set()
        self.is_deaf = False

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:  # CUDA's name
        self.locked.add(address)
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # CUDA's name
        if not self.is_deaf:
            self.locked.discard(address)
        return 0 if address not in self.locked or self.is_deaf else 1


@pytest.fixture
def runtime() -> Runtime:
    return Runtime()


@pytest.fixture
def table(runtime: Runtime, tmp_path: Path) -> LockTable:
    maps = tmp_path / "maps"
    maps.write_text(MAPS)
    return LockTable(lambda: runtime, runtime.locked.__contains__, maps)


def test_ranges_of_a_process_are_read_with_their_names() -> None:
    assert mappings(MAPS) == [
        (0x400000, 0x402000, "/usr/bin/python3"),
        (0x402000, 0x404000, ""),
        (0x500000, 0x501000, "/dev/zero (deleted)"),
    ]


@pytest.mark.parametrize(
    ("begin", "end", "expected"),
    [
        (0x400000, 0x404000, True),
        (0x401000, 0x403000, True),
        (0x403000, 0x405000, False),
        (0x3FF000, 0x401000, False),
        (0x500000, 0x500010, True),
        (0x600000, 0x600001, False),
    ],
)
def test_a_range_is_covered_where_all_of_it_is_mapped(begin: int, end: int, expected: bool) -> None:
    assert covers(mappings(MAPS), begin, end) == expected


def test_memory_that_is_locked_and_unlocked_in_time_is_no_problem(table: LockTable) -> None:
    table.cudaHostRegister(0x402000, 2 * PAGE, 0)
    assert table.problems() == []
    table.cudaHostUnregister(0x402000)
    assert table.problems() == []


def test_memory_that_is_given_back_before_its_unlock_is_named(table: LockTable) -> None:
    table.cudaHostRegister(0x404000, PAGE, 0)
    assert table.problems() == [f"{PAGE} bytes at 0x404000 are locked and not mapped"]
    table.cudaHostUnregister(0x404000)
    assert table.problems() == [
        f"{PAGE} bytes at 0x404000 were given back before they were unlocked"
    ]


def test_memory_that_is_locked_after_its_unlock_is_named(
    table: LockTable, runtime: Runtime
) -> None:
    runtime.is_deaf = True
    table.cudaHostRegister(0x402000, PAGE, 0)
    table.cudaHostUnregister(0x402000)
    assert table.problems() == [f"{PAGE} bytes at 0x402000 are locked after their unlock"]


def test_memory_that_is_locked_again_is_no_problem(table: LockTable) -> None:
    table.cudaHostRegister(0x402000, PAGE, 0)
    table.cudaHostUnregister(0x402000)
    table.cudaHostRegister(0x402000, PAGE, 0)
    assert table.problems() == []
