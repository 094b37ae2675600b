"""SiLU or GELU of the gate times the up projection, and the clamped SwiGLU, on a CPU. Twins:
`kernels.norm.silu_mul`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from numba import njit

from .compiler.compiled import Kernel, argument, items
from .compiler.scalars import size_of
from .compiler.simd import add, div, fma, load, maximum, minimum, mul, splat, store, sub
from .compiler.simd_math import exp
from .compiler.simd_types import BF16_ELEMENT, F32, F32_ELEMENT, NUM_LANES

_CLAMP = 7.0
_SIGMOID_SCALE = 1.702
_GELU_LINEAR = 1.5957691216057308
_GELU_CUBIC = 0.07135481282052724
"""2 sqrt(2 / pi), and 0.044715 times as much."""


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """SiLU of the gate times the up projection: gate_up [T, 2 I], contiguous, with the gate in the
    first half of a row; I divides by 16. Returns [T, I]."""
    return _run(KERNEL, gate_up)


def gelu_tanh_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Like `silu_mul`, with GELU in its approximation by tanh."""
    return _run(GELU_KERNEL, gate_up)


def clamped_swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """Like `silu_mul`, with a gate that is at most 7 and a steeper sigmoid, of an up between -7 and
    7, to which one is added."""
    return _run(CLAMPED_KERNEL, gate_up)


GATES = {"silu": silu_mul, "gelu_tanh": gelu_tanh_mul, "clamped_swiglu": clamped_swiglu}
"""Gated activations by the names that models have."""


def _run(kernel: Kernel, gate_up: torch.Tensor) -> torch.Tensor:
    num_rows = gate_up.shape[0]
    width = gate_up.shape[1] // 2
    assert gate_up.is_contiguous()
    out = gate_up.new_empty(num_rows, width)
    kernel(gate_up.dtype, num_rows, 4 * out.numel(), gate_up.data_ptr(), out.data_ptr(), width)
    return out


# Both activations are x / (1 + exp(-z)). Of SiLU z is x; GELU is x (1 + tanh u) / 2, and z is 2 u.
@njit
def _silu(x: Any) -> Any:
    return x


@njit
def _gelu_tanh(x: Any) -> Any:
    return mul(x, fma(mul(x, x), splat(F32(_GELU_CUBIC)), splat(F32(_GELU_LINEAR))))


def _row_of(exponent: Callable[[Any], Any]) -> Callable[[int, int, Any], None]:
    """Returns the function that computes a row with the activation of `z`.

    NOTE: z is no argument of the row: where a CPU's compiler does not inline the row, the machine
    code would hold the address of a Python object, and could not be kept.
    """

    @njit
    def row(arguments: int, i: int, element: Any) -> None:
        size = argument(arguments, 2) * size_of(element)
        p_gate = argument(arguments, 0) + i * 2 * size
        p_out = argument(arguments, 1) + i * size
        one = splat(F32(1))
        zero = splat(F32(0))
        for at in range(0, size, NUM_LANES * size_of(element)):
            gate = load(p_gate + at, element)
            activated = div(gate, add(one, exp(sub(zero, exponent(gate)))))
            store(p_out + at, mul(activated, load(p_gate + size + at, element)), element)

    return row  # type: ignore[no-any-return]  # what numba makes of it


_silu_row = _row_of(_silu)
_gelu_row = _row_of(_gelu_tanh)


@njit
def _clamped_row(arguments: int, i: int, element: Any) -> None:
    size = argument(arguments, 2) * size_of(element)
    p_gate = argument(arguments, 0) + i * 2 * size
    p_out = argument(arguments, 1) + i * size
    one = splat(F32(1))
    zero = splat(F32(0))
    most = splat(F32(_CLAMP))
    least = splat(F32(-_CLAMP))
    slope = splat(F32(_SIGMOID_SCALE))
    for at in range(0, size, NUM_LANES * size_of(element)):
        gate = minimum(load(p_gate + at, element), most)
        up = maximum(minimum(load(p_gate + size + at, element), most), least)
        activated = div(gate, add(one, exp(sub(zero, mul(slope, gate)))))
        store(p_out + at, mul(activated, add(up, one)), element)


def _clamped_rows(element: Any) -> Any:
    def work(arguments: int) -> None:
        for i in items(arguments):
            _clamped_row(arguments, i, element)

    return work


def _rows(is_gelu: bool, element: Any) -> Any:
    def work(arguments: int) -> None:
        for i in items(arguments):
            if is_gelu:
                _gelu_row(arguments, i, element)
            else:
                _silu_row(arguments, i, element)

    return work


KERNEL = Kernel(_rows(False, F32_ELEMENT), _rows(False, BF16_ELEMENT))
GELU_KERNEL = Kernel(_rows(True, F32_ELEMENT), _rows(True, BF16_ELEMENT))
CLAMPED_KERNEL = Kernel(_clamped_rows(F32_ELEMENT), _clamped_rows(BF16_ELEMENT))
