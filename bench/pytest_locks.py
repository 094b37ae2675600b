"""Plugin of pytest: finds page-locked host memory whose lock outlives it.

A copy that begins in a page which CUDA still takes for locked, and ends behind it, fails with
"invalid argument", wherever in the process it is made and whatever lies there by then. The plugin
keeps a table of the ranges that `locked_memory` locks, compares it with the memory that the process
has mapped at each unlock and at the end of every test marked `gpu`, and fails there. Where a copy
fails so, its report shows what CUDA says of the memory at both ends.
"""

from __future__ import annotations

import bisect
import ctypes
import mmap
import sys
from collections.abc import Callable, Generator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

LOCKED_MEMORY = "headwater.engine_core.executors.device.locked_memory"
MAPS = Path("/proc/self/maps")
_MEMORY_TYPE = 2
"""CU_POINTER_ATTRIBUTE_MEMORY_TYPE."""
_HOST = 1
"""CU_MEMORYTYPE_HOST."""
_ATTRIBUTES = {"memory type": 2, "range begins at": 11, "range has bytes": 12}


def is_locked(address: int) -> bool:
    """Whether CUDA takes the page of an address for page-locked host memory."""
    kind = ctypes.c_uint()
    query = ctypes.CDLL("libcuda.so.1").cuPointerGetAttribute
    code = query(ctypes.byref(kind), _MEMORY_TYPE, ctypes.c_uint64(address))
    return code == 0 and kind.value == _HOST


def described(address: int) -> str:
    """Describes an address as CUDA sees it: its kind of memory (1: host, 2: device) and its range,
    or an error code where CUDA does not know it."""
    query = ctypes.CDLL("libcuda.so.1").cuPointerGetAttribute
    found = []
    for name, number in _ATTRIBUTES.items():
        value = ctypes.c_uint64()
        code = query(ctypes.byref(value), number, ctypes.c_uint64(address))
        found.append(f"{name} {value.value:#x}" if code == 0 else f"{name}: error {code}")
    return f"{address:#x}: {', '.join(found)}"


def copies_tried() -> list[str]:
    """Whether each part of a copy to the GPU works now: the buffers at both ends, then the copy."""
    torch = sys.modules["torch"]
    heap = torch.arange(4, dtype=torch.int32)
    lines = [f"heap {described(heap.data_ptr())}, is pinned: {heap.is_pinned()}"]
    buffers: dict[str, Callable[[], Any]] = {
        "pinned": lambda: torch.empty(4, dtype=torch.int32, pin_memory=True),
        "device": lambda: torch.empty(4, dtype=torch.int32, device="cuda"),
    }
    ends: dict[str, Any] = {"heap": heap}
    for name, make in buffers.items():
        try:
            ends[name] = make()
            lines.append(f"{name} {described(ends[name].data_ptr())}")
        except RuntimeError as error:
            lines.append(f"{name}: {error}")
    for name in ("heap", "pinned"):
        try:
            ends["device"].copy_(ends[name])
            lines.append(f"a copy from {name} works")
        except (RuntimeError, KeyError) as error:
            lines.append(f"a copy from {name}: {error}")
    lines += [
        f"segment of {each['total_size']} bytes, {each['segment_type']}, pool"
        f" {each['segment_pool_id']}: {described(each['address'])}"
        for each in torch.cuda.memory_snapshot()
    ]
    return lines


def mappings(maps: str) -> list[tuple[int, int, str]]:
    """Begin, end and name of each range of a `/proc/PID/maps`, in order."""
    found = []
    for line in maps.splitlines():
        fields = line.split(maxsplit=5)
        begin, _, end = fields[0].partition("-")
        found.append((int(begin, 16), int(end, 16), fields[5] if len(fields) > 5 else ""))
    return found


def covers(mapped: list[tuple[int, int, str]], begin: int, end: int) -> bool:
    """Whether all of a range is mapped."""
    at = bisect.bisect_right(mapped, (begin, sys.maxsize, "")) - 1
    while begin < end:
        if not (0 <= at < len(mapped) and mapped[at][0] <= begin < mapped[at][1]):
            return False
        begin = mapped[at][1]
        at += 1
    return True


class LockTable:
    """CUDA's runtime as `locked_memory` sees it, with a table of the ranges that it locks."""

    def __init__(
        self,
        runtime: Callable[[], Any],
        locked: Callable[[int], bool] = is_locked,
        maps: Path = MAPS,
    ) -> None:
        self._runtime = runtime
        self._is_locked = locked
        self._maps = maps
        self.live: dict[int, int] = {}
        """Bytes by address."""
        self._ended: dict[int, int] = {}
        self._problems: list[str] = []

    @property
    def cudaError(self) -> Any:  # CUDA's name
        return self._runtime().cudaError

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> Any:  # CUDA's name
        code = self._runtime().cudaHostRegister(address, num_bytes, flags)
        if code == self.cudaError.success:
            self.live[address] = num_bytes
            self._ended.pop(address, None)
        return code

    def cudaHostUnregister(self, address: int) -> Any:  # CUDA's name
        num_bytes = self.live.get(address, 0)
        where = f"{num_bytes} bytes at {address:#x}"
        if not covers(self._mapped(), address, address + num_bytes):
            self._problems.append(f"{where} were given back before they were unlocked")
        code = self._runtime().cudaHostUnregister(address)
        if code != self.cudaError.success:
            self._problems.append(f"{where} cannot be unlocked: CUDA error {int(code)}")
            return code
        self._ended[address] = self.live.pop(address, 0)
        return code

    def problems(self) -> list[str]:
        """The problems since the last call, and those of the memory as it is now."""
        found = self._problems
        self._problems = []
        mapped = self._mapped()
        for address, num_bytes in self.live.items():
            if not covers(mapped, address, address + num_bytes):
                found.append(f"{num_bytes} bytes at {address:#x} are locked and not mapped")
        for address, num_bytes in list(self._ended.items()):
            pages = range(address, address + num_bytes, mmap.PAGESIZE)
            # Another object may have locked memory that was mapped at these addresses later.
            if any(self._is_locked(page) and not self._holds(page) for page in pages[:1]):
                found.append(f"{num_bytes} bytes at {address:#x} are locked after their unlock")
            del self._ended[address]
        return found

    def _mapped(self) -> list[tuple[int, int, str]]:
        return mappings(self._maps.read_text())

    def _holds(self, address: int) -> bool:
        return any(
            begin <= address < begin + -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
            for begin, size in self.live.items()
        )


class LockHealth:
    """Looks at the locks of the process after each test that is marked `gpu`."""

    def __init__(self) -> None:
        self._table: LockTable | None = None

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        self._attach(sys.modules.get(LOCKED_MEMORY))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, Any, Any]:
        report = yield
        if report.failed and "invalid argument" in report.longreprtext and self._table is not None:
            lines = [*self._table.problems(), *copies_tried(), MAPS.read_text()]
            report.sections.append(("locked memory", "\n".join(lines)))
        return report

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None, None, None]:
        yield
        self._attach(sys.modules.get(LOCKED_MEMORY))
        if self._table is None or item.get_closest_marker("gpu") is None:
            return
        if problems := self._table.problems():
            pytest.fail("; ".join(problems), pytrace=False)

    def _attach(self, module: ModuleType | None) -> None:
        if self._table is None and module is not None:
            table = LockTable(module._runtime)
            module._runtime = lambda: table  # type: ignore[attr-defined]
            self._table = table
