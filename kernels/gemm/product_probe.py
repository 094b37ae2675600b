"""Compares the library's products with `wide_gemm`, to the bit, on a GPU. Knows no models and keeps
no verdicts.

A product that splits K, or adds in another order, differs in some of many random results; `gemm`
leaves no product of such a shape to the library.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import triton

from ..launch.device import driver_version
from . import gemm, hopper_wide_gemm, wide_gemm, wide_tiles

Multiply = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
"""Multiplies x [M, K] by weight [N, K] into out [M, N]."""
SHIFTS = (1, 7, 32)
"""Numbers of rows by which windows of one size are shifted, in turn: a row has other places, and x
another alignment."""


class Product(NamedTuple):
    """A product's shape and dtype, by which the library chooses an algorithm, beside the number of
    rows."""

    num_outputs: int
    num_inputs: int
    dtype: torch.dtype

    @classmethod
    def of(cls, weight: torch.Tensor) -> Product:
        return cls(weight.shape[0], weight.shape[1], weight.dtype)


def own_reference(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """Writes the reference product by always the same kernel of ours, so that a probe compiles one:
    all have the same bits."""
    wide_gemm.wide_gemm(x, weight, out, wide_gemm.tiles_for(weight)[0])


def launch_reference(weight: torch.Tensor) -> None:
    """Launches the kernel that a probe of weights like this one compares with."""
    own_reference(weight.new_zeros(1, weight.shape[1]), weight, weight.new_empty(1, len(weight)))


def differing(
    row_counts: Mapping[Product, Sequence[int]],
    device: torch.device,
    *,
    weights: Mapping[Product, torch.Tensor] | None = None,
    library: Multiply = gemm.library_gemm,
    own: Multiply = own_reference,
) -> set[Product]:
    """Products for which the library's bits differ from our kernel's at some of these numbers of
    rows, among those for which `linear` would use the library. `weights` [N, K] of each; random
    ones by default. Launches all comparisons and waits once, at the end."""
    differs = torch.zeros(len(row_counts), dtype=torch.bool, device=device)
    generator = torch.Generator(device).manual_seed(0)
    for i, (product, counts) in enumerate(row_counts.items()):
        _, k, dtype = product
        random = partial(torch.randn, dtype=dtype, device=device, generator=generator)
        x = random(max(counts) + max(SHIFTS), k)
        weight = random(*product[:2]) if weights is None else weights[product]
        _compare(x, weight, counts, differs[i], library, own)
    return {
        product for product, is_other in zip(row_counts, differs.tolist(), strict=True) if is_other
    }


def _compare(
    x: torch.Tensor,
    weight: torch.Tensor,
    row_counts: Sequence[int],
    differs: torch.Tensor,
    library: Multiply,
    own: Multiply,
) -> None:
    """Sets `differs`, a bool, where a window of x has other bits than the same rows among all."""
    expected = x.new_empty(len(x), len(weight))
    own(x, weight, expected)
    out = torch.empty_like(expected)
    for i, num_rows in enumerate(row_counts):
        if gemm.uses_library(x[:num_rows], weight):
            for start in (0, SHIFTS[i % len(SHIFTS)]):
                some = out[:num_rows]
                library(x[start : start + num_rows], weight, some)
                differs |= (_bits(some) != _bits(expected[start : start + num_rows])).any()


def _bits(values: torch.Tensor) -> torch.Tensor:
    """The bits as integers: a NaN equals itself, and zeros have signs."""
    return values.view(torch.int16 if values.element_size() == 2 else torch.int32)


def facts(device: torch.device) -> dict[str, str]:
    """Facts that a verdict depends on besides product and numbers of rows."""
    sources = [
        Path(module.__file__ or "") for module in (gemm, wide_gemm, wide_tiles, hopper_wide_gemm)
    ] + [Path(__file__)]
    digest = hashlib.blake2b(b"".join(path.read_bytes() for path in sources), digest_size=16)
    return {
        "device": torch.cuda.get_device_name(device),
        "driver": driver_version(),
        "torch": str(torch.__version__),
        "cublaslt": _library_version(),
        "triton": triton.__version__,
        "sources": digest.hexdigest(),
    }


def _library_version() -> str:
    """Version of the cuBLASLt that torch has loaded."""
    assert torch.version.cuda is not None
    library = ctypes.CDLL(f"libcublasLt.so.{torch.version.cuda.split('.')[0]}")
    library.cublasLtGetVersion.restype = ctypes.c_size_t
    return str(library.cublasLtGetVersion())
