"""Host memory that a GPU reads and writes where it is.

Locks are of whole pages. Memory of a heap shares its first and last page with whatever lies beside
it: a copy that begins in a locked page and ends behind it fails with "invalid argument", wherever
in the process it is made.
"""

from __future__ import annotations

import math
import mmap
import weakref
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.cuda import cudart


def mapped(shape: tuple[int, ...], dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """Zeros in pages of their own. Raises `OSError` where the host has not so much memory."""
    pages = mmap.mmap(
        -1, math.prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    )
    return torch.frombuffer(pages, dtype=dtype).view(shape)


def has_own_pages(memory: torch.Tensor) -> bool:
    """Whether it begins where a page does, like all that is mapped."""
    return memory.data_ptr() % mmap.PAGESIZE == 0


def is_mapped(array: npt.NDArray[Any]) -> bool:
    """Whether it begins where a mapping does. What lies on a heap may begin where a page does, too,
    and share its last page."""
    base: Any = array
    while isinstance(base, np.ndarray):
        base = base.base
    base = base.obj if isinstance(base, memoryview) else base
    return isinstance(base, mmap.mmap) and array.ctypes.data % mmap.PAGESIZE == 0


_LOCKED_FOR_GOOD: list[torch.Tensor] = []
"""Memory that CUDA failed to unlock. It is kept until the process ends: copies from memory that is
mapped at the same addresses later would fail."""


class LockedMemory:
    """Locks the memory of a tensor until `release`, or until this object is deleted. Memory that is
    freed while it is locked makes copies from its addresses fail later."""

    def __init__(self, memory: torch.Tensor) -> None:
        """`memory` has pages of its own. Raises `RuntimeError` where the host does not let so much
        be locked."""
        assert has_own_pages(memory)
        self.memory = memory
        runtime = _runtime()
        code = runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
        if code != runtime.cudaError.success:
            raise RuntimeError(f"{memory.nbytes} bytes cannot be locked: CUDA error {int(code)}")
        # Holds a reference to the memory, which is therefore unlocked before it is freed.
        self._unlock = weakref.finalize(self, _unlock, memory)
        # The end of the process releases its locks; CUDA may have shut down before.
        self._unlock.atexit = False

    def release(self) -> None:
        """Unlocks the memory, which no copy in flight may read or write. Raises `RuntimeError`
        where CUDA does not unlock it."""
        self._unlock()


def _unlock(memory: torch.Tensor) -> None:
    runtime = _runtime()
    if (code := runtime.cudaHostUnregister(memory.data_ptr())) != runtime.cudaError.success:
        _LOCKED_FOR_GOOD.append(memory)
        raise RuntimeError(f"{memory.nbytes} bytes cannot be unlocked: CUDA error {int(code)}")


def _runtime() -> Any:
    return cudart()  # type: ignore[no-untyped-call]  # torch ships it so
