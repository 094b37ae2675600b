"""x @ weight.T on a CPU with weights in the order that oneDNN's kernels read, packed once instead
of in every product.

Measured on two Zen 5 cores with torch 2.13, 2026-11-21: bfloat16 products of 1…16 rows take 0.55 to
0.75 of the time and have the same bits. Packed weights may lie in foreign memory, a mapped file for
instance.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path

import torch

ROWS_EXPECTED = 16
"""Hint to the library; by measurement every number of rows gives one layout."""


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """Layout of the library for a weight of one shape and type on this machine."""

    shape: tuple[int, int]
    dtype: torch.dtype
    description: bytes
    """Description by the library; equal descriptions mean equal layouts."""
    num_bytes: int

    @classmethod
    def of(cls, shape: tuple[int, int], dtype: torch.dtype) -> PackedLayout:
        packed = pack(torch.zeros(shape, dtype=dtype))
        description = torch.ops.mkldnn._get_mkldnn_serialized_md(packed)
        return cls(shape, dtype, bytes(description.tolist()), num_bytes_of(packed))


def can_pack(dtype: torch.dtype) -> bool:
    """Whether this machine's torch multiplies packed weights of this type."""
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


def pack(weight: torch.Tensor) -> torch.Tensor:
    """Converts weight [N, K] to the library's layout, opaque to everything but `linear`."""
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS_EXPECTED)
    return packed


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [T, K] times weight [N, K] as `pack` made it: [T, N]."""
    product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
    return product


def biased_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, *, has_gelu: bool
) -> torch.Tensor:
    """x [T, K] times weight [N, K] as `pack` made it, plus bias [N], and GELU by the error function
    of that where it is wanted: [T, N]."""
    name, algorithm = ("gelu", "none") if has_gelu else ("none", "")
    product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, name, [], algorithm)
    return product


def num_bytes_of(packed: torch.Tensor) -> int:
    """Number of bytes of a packed weight."""
    num_bytes: int = torch.ops.mkldnn._nbytes(packed)
    return num_bytes


def copy_packed(packed: torch.Tensor, out: torch.Tensor) -> None:
    """Writes a packed weight into out uint8 [num_bytes]."""
    assert out.is_contiguous()
    assert out.numel() == num_bytes_of(packed)
    ctypes.memmove(out.data_ptr(), torch.ops.mkldnn.data_ptr(packed), out.numel())


def packed_view(memory: torch.Tensor, layout: PackedLayout) -> torch.Tensor:
    """View of a packed weight in memory uint8 [num_bytes], which must outlive it."""
    assert memory.is_contiguous()
    assert memory.numel() == layout.num_bytes
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    num_rows, num_columns = layout.shape
    dtype_name = str(layout.dtype).removeprefix("torch.")
    handle = ctypes.c_void_p()
    # torch's stable C interface: the way that its own compiled programs take packed weights from
    # their constants.
    failed = library.aoti_torch_create_tensor_from_blob_v2(
        ctypes.c_void_p(memory.data_ptr()),
        ctypes.c_int64(2),
        (ctypes.c_int64 * 2)(num_rows, num_columns),
        (ctypes.c_int64 * 2)(num_columns, 1),
        ctypes.c_int64(0),
        ctypes.c_int32(getattr(library, f"aoti_torch_dtype_{dtype_name}")()),
        ctypes.c_int32(library.aoti_torch_device_type_cpu()),
        ctypes.c_int32(0),
        ctypes.byref(handle),
        ctypes.c_int32(library.aoti_torch_layout__mkldnn()),
        ctypes.c_char_p(layout.description),
        ctypes.c_int64(len(layout.description)),
    )
    if failed:
        raise RuntimeError(f"torch refused a packed weight of {layout.shape} in {dtype_name}")
    capsule = ctypes.pythonapi.PyCapsule_New
    capsule.restype = ctypes.py_object
    capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    packed: torch.Tensor = torch._C._aoti.alloc_tensor_by_stealing_from_void_ptr(
        capsule(handle, None, None)
    )
    return packed
