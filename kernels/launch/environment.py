"""The environment that computes results beside this project's sources: device, driver and libraries
with versions.

Two environments that are equal give equal sources the same bits. Knows nothing about models.
"""

from __future__ import annotations

import ctypes
import platform
from dataclasses import dataclass

import numpy as np
import torch

CUBLAS_PROPERTIES = range(3)
"""Numbers of MAJOR_VERSION, MINOR_VERSION and PATCH_LEVEL in `libraryPropertyType`."""
NVML_VERSION_BYTES = 80
"""Value of NVML_SYSTEM_DRIVER_VERSION_BUFFER_SIZE."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """Device, driver and libraries. Equal values mean equal bits."""

    device: str
    """Processor, and the features that kernels are compiled for."""
    driver: str
    """Driver version on a GPU; empty on a CPU."""
    libraries: tuple[tuple[str, str], ...]
    """(name, version) of each library that computes, compiles or launches."""

    @classmethod
    def of(cls, device: torch.device) -> Environment:
        return _of_gpu(device) if device.type == "cuda" else _of_cpu()


def _of_gpu(device: torch.device) -> Environment:
    # Imported here, as numba below: each is installed only where it compiles.
    import triton  # noqa: PLC0415

    gpu = torch.cuda.get_device_properties(device)
    major = (torch.version.cuda or "").split(".")[0]
    libraries = {
        "triton": triton.__version__,
        "cublas": _cuda_library_version(f"libcublas.so.{major}", "cublasGetProperty"),
        "cublasLt": _cuda_library_version(f"libcublasLt.so.{major}", "cublasLtGetProperty"),
    }
    return Environment(
        device=f"{gpu.name}, {gpu.major}.{gpu.minor}, {gpu.multi_processor_count} multiprocessors",
        driver=_driver_version(),
        libraries=_common_libraries() + tuple(libraries.items()),
    )


def _of_cpu() -> Environment:
    import llvmlite  # noqa: PLC0415
    import llvmlite.binding as llvm  # noqa: PLC0415
    import numba  # noqa: PLC0415

    features = llvm.get_host_cpu_features().flatten()
    kind = (
        f"{platform.machine()} {llvm.get_host_cpu_name()}, "
        f"{torch.backends.cpu.get_cpu_capability()}"
    )
    libraries = {
        "numba": numba.__version__,
        "llvmlite": llvmlite.__version__,
        "llvm": str(llvm.llvm_version_info),
    }
    return Environment(
        device=f"{kind}, {features}",
        driver="",
        libraries=_common_libraries() + tuple(libraries.items()),
    )


def _common_libraries() -> tuple[tuple[str, str], ...]:
    # Builds of one version differ in the libraries that they are linked with.
    return (
        ("torch", torch.__version__),
        ("build of torch", torch.__config__.show()),
        ("numpy", np.__version__),
    )


def _cuda_library_version(name: str, property_function: str) -> str:
    """Version of a library as it is loaded, from any package or folder."""
    try:
        get = getattr(ctypes.CDLL(name), property_function)
    except OSError:
        # Linked into torch, so torch's version and build identify it.
        return "part of torch"
    numbers = []
    for which in CUBLAS_PROPERTIES:
        number = ctypes.c_int()
        _check(get(which, ctypes.byref(number)), property_function)
        numbers.append(str(number.value))
    return ".".join(numbers)


def _driver_version() -> str:
    """Release of the NVIDIA driver. A container may lack the library that reports it; then the
    version of CUDA that the driver offers."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        offered = ctypes.c_int()
        _check(
            ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(offered)),
            "cuDriverGetVersion",
        )
        return f"CUDA {offered.value}"
    version = ctypes.create_string_buffer(NVML_VERSION_BYTES)
    _check(nvml.nvmlInit_v2(), "nvmlInit_v2")
    try:
        _check(
            nvml.nvmlSystemGetDriverVersion(version, NVML_VERSION_BYTES),
            "nvmlSystemGetDriverVersion",
        )
    finally:
        nvml.nvmlShutdown()
    return version.value.decode()


def _check(status: int, function: str) -> None:
    if status:
        raise RuntimeError(f"{function} failed with status {status}")
