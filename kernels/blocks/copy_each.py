"""Copies rows between page-locked host memory and a GPU, each to a place of its own, by the GPU's
copy engine.

One command takes them all: commands of their own keep the bus waiting for 1 µs each, and the host
for 10 µs where torch gives them (H200, 2026-11-29).
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Int32Array = npt.NDArray[np.int32]
_IN_STREAM_ORDER = 1


def copy_each(
    source: torch.Tensor, target: torch.Tensor, source_rows: Int32Array, target_rows: Int32Array
) -> None:
    """Launches copies of rows source_rows[i] to target_rows[i], which differ, on torch's current
    stream, without waiting. source, target [N, words], contiguous, of one dtype. What is on the
    host is page-locked and stays until the copies are done. Raises `OSError` where the driver
    refuses."""
    assert source.is_contiguous()
    assert target.is_contiguous()
    assert source[0].nbytes == target[0].nbytes
    if source_rows.size:
        width = source[0].nbytes
        sources = _addresses(source, source_rows, width)
        targets = _addresses(target, target_rows, width)
        stream = _stream()
        _use_context_of(stream)
        if code := _launch(targets, sources, width, stream):
            raise OSError(
                f"copies of {source_rows.size} rows of {width} bytes failed with error {code} of "
                "the GPU's driver"
            )


def _addresses(memory: torch.Tensor, rows: Int32Array, width: int) -> npt.NDArray[np.uint64]:
    return memory.data_ptr() + rows.astype(np.uint64) * np.uint64(width)


def _stream() -> int:
    return int(torch.cuda.current_stream().cuda_stream)


def _use_context_of(stream: int) -> None:
    """Gives a thread that launched nothing yet the GPU's context, as torch does at a first launch
    of its own. The driver refuses copies of a thread without one."""
    driver = _driver()
    context = ctypes.c_void_p()
    driver.cuCtxGetCurrent(ctypes.byref(context))
    if not context.value:
        driver.cuStreamGetCtx(ctypes.c_void_p(stream), ctypes.byref(context))
        driver.cuCtxSetCurrent(context)


@cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


class _Place(ctypes.Structure):
    """The driver's CUmemLocation; empty where addresses say it."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Attributes(ctypes.Structure):
    """The driver's CUmemcpyAttributes."""

    _fields_ = (
        ("order", ctypes.c_int),
        ("source", _Place),
        ("target", _Place),
        ("flags", ctypes.c_uint),
    )


def _launch(
    targets: npt.NDArray[np.uint64], sources: npt.NDArray[np.uint64], width: int, stream: int
) -> int:
    """The driver's error code, 0 for none."""
    driver = _driver()
    count = len(sources)
    if not hasattr(driver, "cuMemcpyBatchAsync"):
        # Drivers before CUDA 12.8 take one command a row.
        copy = driver.cuMemcpyAsync
        copy.argtypes = (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p)
        pairs = zip(targets.tolist(), sources.tolist(), strict=True)
        return next((code for pair in pairs if (code := copy(*pair, width, stream))), 0)
    widths = np.full(count, width, np.uint64)
    attributes = _Attributes(order=_IN_STREAM_ORDER)
    failed_at = ctypes.c_size_t()
    return int(
        driver.cuMemcpyBatchAsync(
            *(ctypes.c_void_p(each.ctypes.data) for each in (targets, sources, widths)),
            ctypes.c_size_t(count),
            ctypes.byref(attributes),
            ctypes.byref(ctypes.c_size_t(0)),
            ctypes.c_size_t(1),
            ctypes.byref(failed_at),
            ctypes.c_void_p(stream),
        )
    )
