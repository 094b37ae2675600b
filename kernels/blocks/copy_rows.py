"""Copies rows between page-locked host memory and a GPU where rows lie apart, by the GPU's copy
engine.

torch copies such rows by way of a contiguous tensor that it makes on the host, and waits for it.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

_HOST = 1
_DEVICE = 2


def copy_rows(source: torch.Tensor, target: torch.Tensor) -> None:
    """Launches one copy on torch's current stream, without waiting. source, target [N, words] of
    one dtype; the words of a row lie together, rows lie equally far apart. What is on the host is
    page-locked and stays until the copy is done. Raises `OSError` where the driver refuses."""
    assert source.shape == target.shape
    assert source.dtype == target.dtype
    assert source.stride(1) == target.stride(1) == 1
    num_rows, num_words = source.shape
    if num_rows:
        width = num_words * source.element_size()
        copy = _Copy(_end(source, width), _end(target, width), width, num_rows)
        if code := _launch(copy, _stream()):
            raise OSError(
                f"a copy of {num_rows} rows of {width} bytes failed with error {code} of the "
                "GPU's driver"
            )


class _End(ctypes.Structure):
    """One half of the driver's CUDA_MEMCPY2D."""

    _fields_ = (
        ("x", ctypes.c_size_t),
        ("y", ctypes.c_size_t),
        ("kind", ctypes.c_uint),
        ("host", ctypes.c_void_p),
        ("device", ctypes.c_uint64),
        ("array", ctypes.c_void_p),
        ("pitch", ctypes.c_size_t),
    )


class _Copy(ctypes.Structure):
    """The driver's CUDA_MEMCPY2D."""

    _fields_ = (
        ("source", _End),
        ("target", _End),
        ("width", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
    )


def _end(rows: torch.Tensor, width: int) -> _End:
    # A single row may have any stride.
    pitch = max(rows.stride(0) * rows.element_size(), width)
    if rows.is_cuda:
        return _End(kind=_DEVICE, device=rows.data_ptr(), pitch=pitch)
    return _End(kind=_HOST, host=rows.data_ptr(), pitch=pitch)


def _launch(copy: _Copy, stream: int) -> int:
    driver: Any = ctypes.CDLL("libcuda.so.1")
    return int(driver.cuMemcpy2DAsync_v2(ctypes.byref(copy), ctypes.c_void_p(stream)))


def _stream() -> int:
    return int(torch.cuda.current_stream().cuda_stream)
