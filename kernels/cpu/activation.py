"""Activations without a gate, on a CPU. An element's bits do not depend on where it stands. Twin:
`kernels.norm.activation`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from numba import njit
from torch.nn.functional import pad

from .compiler.compiled import Kernel, argument, items
from .compiler.scalars import size_of
from .compiler.simd import add, div, fma, load, maximum, mul, splat, store, sub
from .compiler.simd_math import erf, exp, tanh
from .compiler.simd_types import BF16_ELEMENT, F32, F32_ELEMENT, NUM_LANES

_GELU_LINEAR = 1.5957691216057308
_GELU_CUBIC = 0.07135481282052724
"""2 sqrt(2 / pi), and 0.044715 times as much."""
_SQRT_HALF = 0.7071067811865476
_STRETCH = 1024
"""Elements of an item of work."""


def activation(x: torch.Tensor, name: str) -> torch.Tensor:
    """x, contiguous and of any shape → the same shape and dtype. `name` is one of `ACTIVATIONS`."""
    assert x.is_contiguous()
    missing = -x.numel() % NUM_LANES
    flat = pad(x.view(-1), (0, missing)) if missing else x.view(-1)
    out = torch.empty_like(flat)
    num_items = -(-flat.numel() // _STRETCH)
    KERNELS[name](
        x.dtype, num_items, 4 * flat.numel(), flat.data_ptr(), out.data_ptr(), flat.numel()
    )
    return out[: x.numel()].view(x.shape)


@njit
def _logistic(x: Any, z: Any) -> Any:
    """x / (1 + exp(-z))"""
    return div(x, add(splat(F32(1)), exp(sub(splat(F32(0)), z))))


@njit
def _sigmoid(x: Any) -> Any:
    return _logistic(splat(F32(1)), x)


@njit
def _silu(x: Any) -> Any:
    return _logistic(x, x)


@njit
def _gelu_tanh(x: Any) -> Any:
    # x (1 + tanh u) / 2, and z is 2 u.
    return _logistic(x, mul(x, fma(mul(x, x), splat(F32(_GELU_CUBIC)), splat(F32(_GELU_LINEAR)))))


@njit
def _gelu(x: Any) -> Any:
    share = add(splat(F32(1)), erf(mul(x, splat(F32(_SQRT_HALF)))))
    return mul(mul(x, splat(F32(0.5))), share)


@njit
def _relu(x: Any) -> Any:
    return maximum(x, splat(F32(0)))


@njit
def _tanh(x: Any) -> Any:
    return tanh(x)


def _stretch_of(function: Callable[[Any], Any]) -> Callable[[int, int, Any], None]:
    @njit
    def stretch(arguments: int, i: int, element: Any) -> None:
        first = i * _STRETCH
        last = min(first + _STRETCH, argument(arguments, 2))
        for at in range(first, last, NUM_LANES):
            x = load(argument(arguments, 0) + at * size_of(element), element)
            store(argument(arguments, 1) + at * size_of(element), function(x), element)

    return stretch  # type: ignore[no-any-return]  # what numba makes of it


_gelu_stretch = _stretch_of(_gelu)
_gelu_tanh_stretch = _stretch_of(_gelu_tanh)
_relu_stretch = _stretch_of(_relu)
_sigmoid_stretch = _stretch_of(_sigmoid)
_silu_stretch = _stretch_of(_silu)
_tanh_stretch = _stretch_of(_tanh)


def _work(name: str, element: Any) -> Callable[[int], None]:
    def work(arguments: int) -> None:
        # Branches of other names are not compiled.
        for i in items(arguments):
            if name == "gelu":
                _gelu_stretch(arguments, i, element)
            elif name == "gelu_tanh":
                _gelu_tanh_stretch(arguments, i, element)
            elif name == "relu":
                _relu_stretch(arguments, i, element)
            elif name == "sigmoid":
                _sigmoid_stretch(arguments, i, element)
            elif name == "silu":
                _silu_stretch(arguments, i, element)
            else:
                _tanh_stretch(arguments, i, element)

    return work


ACTIVATIONS = ("gelu", "gelu_tanh", "relu", "sigmoid", "silu", "tanh")
KERNELS = {
    name: Kernel(_work(name, F32_ELEMENT), _work(name, BF16_ELEMENT)) for name in ACTIVATIONS
}
