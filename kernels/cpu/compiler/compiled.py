"""Kernels in machine code for this CPU, run on the threads that torch computes with: another pool
beside torch's would fight it for the cores.

Knows nothing about what a kernel computes.
"""

from __future__ import annotations

import ctypes
import struct
from array import array
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from numba import cfunc, njit
from numba.core.dispatcher import Dispatcher

from .machine_code import compiling
from .recording import current_recording
from .scalars import int64_at, take_one

SMALL = 1 << 15
"""Number of values that one thread processes before another one has woken."""
DTYPES = (torch.float32, torch.bfloat16)


class Kernel:
    """Work on independent items. Each thread takes the next item, so the order of items is not
    fixed.

    `works` are the kernel for float32 and for bfloat16 elements: functions of the address of their
    arguments, which go through `items`. A function is compiled when its type is first used. It
    finds what numba has made of others by global names.
    """

    def __init__(self, *works: Callable[[int], None]) -> None:
        cells = (cell.cell_contents for work in works for cell in work.__closure__ or ())
        # NOTE: numba's key would contain a name that differs in each process, so that no process
        # would find the code that an earlier one has stored.
        assert not any(isinstance(each, Dispatcher) for each in cells)
        self._works = dict(zip(DTYPES, works, strict=True))
        self._compiled: dict[torch.dtype, tuple[Any, Any]] = {}

    def __call__(
        self, dtype: torch.dtype, num_items: int, num_numbers: int, *arguments: int
    ) -> None:
        """Computes all items. num_numbers: amount of work of all items, for the choice of threads.
        Arguments are whole numbers and addresses, 8 bytes each, read from `argument(…, 0)` on."""
        self.run(dtype, num_numbers, array("q", (0, num_items, *arguments)))

    def run(self, dtype: torch.dtype, num_numbers: int, memory: array[int]) -> None:
        """Runs the kernel like a call, with 0, the number of items and the arguments in memory of
        this run alone, which it writes."""
        call, address = self.compile(dtype)
        p_memory = memory.buffer_info()[0]
        num_threads = torch.get_num_threads()
        if (recording := current_recording()) is not None:
            recording.note(address, memory)
        if (
            num_threads > 1
            and memory[1] > 1
            and num_numbers > SMALL
            and (run_team := team()) is not None
        ):
            run_team(address, p_memory, num_threads, 0)
        else:
            call(p_memory)

    def compile(self, dtype: torch.dtype) -> tuple[Any, Any]:
        """The compiled function and its address, which a process loads once."""
        if (known := self._compiled.get(dtype)) is not None:
            return known
        work = self._works[dtype]
        with compiling(work) as is_kept:
            machine_code = cfunc("void(int64)", cache=is_kept)(work)
        compiled = self._compiled[dtype] = machine_code.ctypes, machine_code.address
        return compiled


@njit
def items(arguments: int) -> Any:
    """Yields the items that this thread takes, until none is left."""
    i = take_one(arguments)
    while i < int64_at(arguments + 8):
        yield i
        i = take_one(arguments)


@njit
def argument(arguments: int, index: int) -> Any:
    return int64_at(arguments + 16 + 8 * index)


@njit
def address_of(arguments: int, index: int) -> int:
    """Address of the argument itself, for numbers that are no integers (see `float_bits`)."""
    return arguments + 16 + 8 * index


@cache
def float_bits(x: float) -> int:
    """An argument that holds float32 x."""
    return int(struct.unpack("<q", struct.pack("<fi", x, 0))[0])


@cache
def team() -> Any:
    """libgomp's entry to a parallel region; None where torch computes with something else, as on
    macOS."""
    library = _gomp()
    if library is None:
        return None
    run = library.GOMP_parallel
    run.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    run.restype = None
    return run


@cache
def barrier_address() -> int:
    """Address of libgomp's barrier function of a parallel region; 0 where there is none."""
    library = _gomp()
    return 0 if library is None else ctypes.cast(library.GOMP_barrier, ctypes.c_void_p).value or 0


@cache
def _gomp() -> ctypes.CDLL | None:
    maps = Path("/proc/self/maps")
    lines = maps.read_text().splitlines() if maps.is_file() else []
    paths = {line.split(maxsplit=5)[-1] for line in lines if "libgomp" in line}
    # Other libraries may have loaded a libgomp, too; torch's lies beside it, unless it uses the
    # system's.
    found = sorted(paths, key=lambda path: not path.startswith(str(Path(torch.__file__).parent)))
    return ctypes.CDLL(found[0]) if found else None
