"""GPUs of this machine, and the number of replicas and the dtype that suit it. Asks the system,
never torch."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from itertools import permutations, takewhile
from pathlib import Path
from typing import Any

from headwater.engine_core.system.usable_cores import quota_cores, usable_cores

DTYPES = ("auto", "float32", "bfloat16", "float16")
_NATIVE_ATOMICS = 3
MAX_NAME_BYTES = 96
FAST_BF16_FLAGS = {"amx_bf16", "avx512_bf16"}
_GPU_ID = re.compile(r"\d+|(GPU|MIG)-.+")
_THREAD_VARIABLES = {"OMP_NUM_THREADS", "MKL_NUM_THREADS"}


def thread_variables(threads: int, env: Mapping[str, str]) -> dict[str, str]:
    """Variables that set the number of compute threads of a process's libraries. With 0 those of
    `env` stay; where it has none and there is a CPU quota, which libraries ignore, there are as
    many threads as usable cores."""
    if not threads and quota_cores() is not None and not _THREAD_VARIABLES & env.keys():
        threads = usable_cores()
    return dict.fromkeys(_THREAD_VARIABLES, str(threads)) if threads else {}


class _Memory(ctypes.Structure):
    """`nvmlMemory_t`, in bytes."""

    _fields_ = (
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


@cache
def gpu_names(load: Callable[[str], Any] = ctypes.CDLL) -> tuple[str, ...]:
    """Names of NVIDIA GPUs as the driver lists them; empty without a driver. `load` opens a
    library: that which `nvidia-smi` asks, and which opens no GPU for this process."""
    name = ctypes.create_string_buffer(MAX_NAME_BYTES)
    return tuple(
        name.value.decode()
        for nvml, handle in _listed_gpus(load)
        if not nvml.nvmlDeviceGetName(handle, name, MAX_NAME_BYTES)
    )


def has_gpu_driver(load: Callable[[str], Any] = ctypes.CDLL) -> bool:
    """Whether this machine has a driver of NVIDIA GPUs. `load` as in `gpu_names`; a driver that
    lists none, as on boards without NVML, is one all the same."""
    if gpu_names(load):
        return True
    try:
        load("libcuda.so.1")
    except OSError:
        return False
    return True


@cache
def least_gpu_memory(load: Callable[[str], Any] = ctypes.CDLL) -> int:
    """Bytes of memory of the GPU that has least, of all that the driver lists; 0 where it says of
    none. `load` as in `gpu_names`."""
    memory = _Memory()
    sizes = (
        int(memory.total)
        for nvml, handle in _listed_gpus(load)
        if not nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory))
    )
    return min(sizes, default=0)


def _listed_gpus(load: Callable[[str], Any]) -> Iterator[tuple[Any, ctypes.c_void_p]]:
    """Driver library and handles of all GPUs. Both stay valid until the generator advances."""
    try:
        nvml = load("libnvidia-ml.so.1")
    except OSError:
        return
    if nvml.nvmlInit_v2():
        return
    count = ctypes.c_uint()
    handle = ctypes.c_void_p()
    if not nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)):
        for i in range(count.value):
            if not nvml.nvmlDeviceGetHandleByIndex_v2(i, ctypes.byref(handle)):
                yield nvml, handle
    nvml.nvmlShutdown()


def visible_gpus(env: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Ids of the GPUs that this process may use: those of CUDA_VISIBLE_DEVICES up to the first
    invalid one, as CUDA reads it. Without the variable, the numbers of all GPUs of the driver."""
    if (listed := env.get("CUDA_VISIBLE_DEVICES")) is None:
        return tuple(str(gpu) for gpu in range(len(gpu_names())))
    return tuple(takewhile(_GPU_ID.fullmatch, (gpu.strip() for gpu in listed.split(","))))


def unreached_gpus(load: Callable[[str], Any] = ctypes.CDLL) -> tuple[int, int] | None:
    """The first two GPUs that do not reach one another's memory with atomic operations, as the
    driver says; None where all do, or there is none. `load` opens a library."""
    try:
        driver = load("libcuda.so.1")
    except OSError:
        return None
    count = ctypes.c_int()
    found = ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return None
    for pair in permutations(range(count.value), 2):
        is_refused = driver.cuDeviceCanAccessPeer(ctypes.byref(found), *pair) or not found.value
        if (
            is_refused
            or driver.cuDeviceGetP2PAttribute(ctypes.byref(found), _NATIVE_ATOMICS, *pair)
            or not found.value
        ):
            return pair
    return None


@cache
def cpu_has_fast_bf16() -> bool:
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return False
    flags = next((line for line in info.read_text().splitlines() if line.startswith("flags")), "")
    return not FAST_BF16_FLAGS.isdisjoint(flags.split())


def default_replicas(device: str, num_ranks: int = 1) -> int:
    """Default number of replicas of an engine with so many ranks. On GPUs, one for each GPU or
    group of GPUs; on a CPU two, since one replica shows little of a cluster, or one where their
    ranks would be more than the cores."""
    if resolve_device(device) == "cuda":
        return max(1, len(visible_gpus()) // num_ranks)
    return 2 if num_ranks == 1 or 2 * num_ranks <= usable_cores() else 1


def resolve_device(device: str) -> str:
    """Device of a setting; `auto` is the GPU where there is one that CUDA_VISIBLE_DEVICES does not
    hide."""
    return device if device != "auto" else ("cuda" if gpu_names() and visible_gpus() else "cpu")


def resolve_dtype(dtype: str, device: str) -> str:
    """Type of a setting; `auto` is bfloat16 on a GPU and on CPUs with instructions for it, float32
    elsewhere."""
    if dtype != "auto":
        return dtype
    return "bfloat16" if device == "cuda" or cpu_has_fast_bf16() else "float32"
