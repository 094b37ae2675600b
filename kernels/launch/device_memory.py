"""Memory of a GPU whose pages can be given back while its addresses stay: a range of addresses is
reserved once, and physical memory is mapped there and unmapped (CUDA's virtual memory
management)."""

from __future__ import annotations

import ctypes
from contextlib import ExitStack
from typing import Any

import torch

_PINNED = 1
_ON_DEVICE = 1
_AS_FILE = 1
"""CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR"""
_CAN_BE_FILE = 103
"""CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED"""
_READ_WRITE = 3
_OUT_OF_MEMORY = 2


class DriverError(OSError):
    """The driver of the GPU refuses a call."""

    def __init__(self, function: str, code: int) -> None:
        super().__init__(f"{function} failed with error {code} of the GPU's driver")
        self.code = code

    @property
    def is_out_of_memory(self) -> bool:
        return self.code == _OUT_OF_MEMORY


class DeviceMemory:
    """A range of addresses on the current GPU, with memory behind it from the start. It lasts until
    the process ends: kernels and graphs name its addresses."""

    def __init__(
        self, num_bytes: int, *, is_shared: bool = False, exported: int | None = None
    ) -> None:
        """`is_shared`: other processes may map the memory too, by `export`. `exported`: the
        descriptor of such memory, of `num_bytes`, that is mapped here; it stays open. Raises
        `DriverError`."""
        # The driver's calls need the context that torch makes with its first tensor.
        torch.cuda.synchronize()
        is_shared = is_shared or exported is not None
        self._properties = _properties(torch.cuda.current_device(), _AS_FILE if is_shared else 0)
        granularity = _granularity(self._properties)
        self.num_bytes = max(1, -(-num_bytes // granularity)) * granularity
        address = ctypes.c_uint64()
        size = ctypes.c_size_t(self.num_bytes)
        _call("cuMemAddressReserve", ctypes.byref(address), size, _size(0), _word(0), _word(0))
        self._address = address.value
        self._handle: int | None = None
        self.map(exported)
        self.bytes: torch.Tensor = torch.as_tensor(
            _Range(self._address, self.num_bytes), device="cuda"
        )
        """uint8 [num_bytes], whose contents are arbitrary when memory was mapped."""

    @property
    def is_mapped(self) -> bool:
        return self._handle is not None

    def map(self, exported: int | None = None) -> None:
        """Puts memory behind the addresses: new, or that of a descriptor. Raises `DriverError`, and
        leaves all as it is then."""
        assert self._handle is None
        handle = ctypes.c_uint64()
        size = _size(self.num_bytes)
        if exported is None:
            properties = ctypes.byref(self._properties)
            _call("cuMemCreate", ctypes.byref(handle), size, properties, _word(0))
        else:
            file = ctypes.c_void_p(exported)
            _call("cuMemImportFromShareableHandle", ctypes.byref(handle), file, _AS_FILE)
        address = _word(self._address)
        access = _Access(self._properties.location, _READ_WRITE)
        with ExitStack() as undo:
            undo.callback(_call, "cuMemRelease", handle)
            _call("cuMemMap", address, size, _size(0), handle, _word(0))
            undo.callback(_call, "cuMemUnmap", address, size)
            _call("cuMemSetAccess", address, size, ctypes.byref(access), _size(1))
            undo.pop_all()
        self._handle = handle.value

    def export(self) -> int:
        """A descriptor of the memory, which the caller closes. The memory lasts as long as it is
        open anywhere, or mapped. Raises `DriverError`."""
        assert self._handle is not None
        file = ctypes.c_int()
        handle = _word(self._handle)
        _call("cuMemExportToShareableHandle", ctypes.byref(file), handle, _AS_FILE, _word(0))
        return file.value

    def unmap(self) -> None:
        """Gives the memory back. Nothing that reads or writes it may be launched."""
        assert self._handle is not None
        _call("cuMemUnmap", _word(self._address), _size(self.num_bytes))
        _call("cuMemRelease", _word(self._handle))
        self._handle = None


class _Range:
    """Addresses as torch takes them."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("device", ctypes.c_int))


class _Flags(ctypes.Structure):
    _fields_ = (
        ("compression", ctypes.c_ubyte),
        ("direct_rdma", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    )


class _Properties(ctypes.Structure):
    """CUmemAllocationProp"""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("windows_handle", ctypes.c_void_p),
        ("flags", _Flags),
    )


class _Access(ctypes.Structure):
    """CUmemAccessDesc"""

    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


def can_share() -> bool:
    """Whether memory of the current GPU can be mapped by other processes."""
    found = ctypes.c_int()
    device = torch.cuda.current_device()
    _call("cuDeviceGetAttribute", ctypes.byref(found), ctypes.c_int(_CAN_BE_FILE), device)
    return bool(found.value)


def _properties(device: int, handle_types: int) -> _Properties:
    location = _Location(_ON_DEVICE, device)
    return _Properties(type=_PINNED, handle_types=handle_types, location=location)


def _granularity(properties: _Properties) -> int:
    """Sizes in bytes are multiples of it."""
    found = ctypes.c_size_t()
    _call(
        "cuMemGetAllocationGranularity",
        ctypes.byref(found),
        ctypes.byref(properties),
        ctypes.c_int(0),
    )
    return found.value


def _size(value: int) -> ctypes.c_size_t:
    return ctypes.c_size_t(value)


def _word(value: int) -> ctypes.c_uint64:
    return ctypes.c_uint64(value)


def _call(function: str, *arguments: object) -> None:
    if code := getattr(ctypes.CDLL("libcuda.so.1"), function)(*arguments):
        raise DriverError(function, code)
