"""SiLU of the gate times the up projection, on a CPU. Twin: `kernels.silu_mul`."""

from __future__ import annotations

from typing import Any

import torch
from numba import njit

from headwater.kernels.cpu.compiled import Kernel, argument, items
from headwater.kernels.cpu.lanes import (
    BF16_ELEMENT,
    F32,
    F32_ELEMENT,
    NUM_LANES,
    add,
    div,
    exp,
    load,
    mul,
    size_of,
    splat,
    store,
    sub,
)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up [T, 2 I] contiguous, the gate in the first half of a row; I divides by 16. Returns [T, I]."""
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    assert gate_up.is_contiguous()
    out = gate_up.new_empty(num_rows, width)
    KERNEL(gate_up.dtype, num_rows, 4 * out.numel(), gate_up.data_ptr(), out.data_ptr(), width)
    return out


@njit
def _silu_row(arguments: int, i: int, element: Any) -> None:
    size = argument(arguments, 2) * size_of(element)
    p_gate, p_out = argument(arguments, 0) + i * 2 * size, argument(arguments, 1) + i * size
    one, zero = splat(F32(1)), splat(F32(0))
    for at in range(0, size, NUM_LANES * size_of(element)):
        gate = load(p_gate + at, element)
        silu = div(gate, add(one, exp(sub(zero, gate))))
        store(p_out + at, mul(silu, load(p_gate + size + at, element)), element)


def _silu_f32(arguments: int) -> None:
    for i in items(arguments):
        _silu_row(arguments, i, F32_ELEMENT)


def _silu_bf16(arguments: int) -> None:
    for i in items(arguments):
        _silu_row(arguments, i, BF16_ELEMENT)


KERNEL = Kernel(_silu_f32, _silu_bf16)
