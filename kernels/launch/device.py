"""Facts about the device that kernels are launched on."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import triton


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    """Number of multiprocessors of a GPU; without a GPU, as many as show that programs share the
    work."""
    return (
        torch.cuda.get_device_properties(device).multi_processor_count
        if device.type == "cuda"
        else 2
    )


def upload(values: npt.NDArray[np.int32], device: torch.device) -> torch.Tensor:
    """Copies values to a device through pinned memory and without waiting; the allocator of pinned
    memory keeps it until the copy is done. The pinned memory is always the allocator's own:
    `pin_memory` would return memory that CUDA takes for locked as it is."""
    pinned = torch.empty(values.shape, dtype=torch.int32, pin_memory=device.type == "cuda")
    pinned.numpy()[...] = values
    return pinned.to(device, non_blocking=True)


def download(values: torch.Tensor) -> torch.Tensor:
    """Copies values of a GPU to pinned memory without waiting: they are there when the current
    stream is done. Those of other devices are there at once."""
    if values.device.type != "cuda":
        return values.cpu()
    pinned = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return pinned.copy_(values, non_blocking=True)


def driver_version() -> str:
    """Version of the GPU's driver, as `nvidia-smi` shows it; without NVML, the CUDA version it
    supports."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        text = ctypes.create_string_buffer(96)
    except OSError:
        version = ctypes.c_int()
        _check(ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version)))
        return f"CUDA {version.value}"
    _check(nvml.nvmlInit_v2())
    _check(nvml.nvmlSystemGetDriverVersion(text, len(text)))
    _check(nvml.nvmlShutdown())
    return text.value.decode()


def _check(code: int) -> None:
    if code:
        raise OSError(f"error {code} of the GPU's driver, asked for its version")


def kernel_cache_dir() -> Path:
    """Folder in which Triton keeps compiled kernels."""
    return Path(triton.knobs.cache.dir)
