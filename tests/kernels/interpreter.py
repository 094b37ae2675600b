"""Mends Triton 3.6's interpreter where it fails or computes something else than a GPU does."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

from tests.kernels import interpreter_speed


def mend() -> None:
    _mend_conversion_to_index()
    _mend_products_of_bfloat16()
    _mend_rounding()
    _mend_waiting()
    interpreter_speed.quicken()


def _mend_conversion_to_index() -> None:
    """numpy 2.4 no longer turns an array of one element into a number."""
    patch = interpreter._patch_lang_tensor

    def patch_and_mend(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_and_mend


def _mend_products_of_bfloat16() -> None:
    """The interpreter keeps bfloat16 as 16-bit integers and would multiply those."""
    multiply = interpreter.InterpreterBuilder.create_dot

    def widen(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        return interpreter.TensorHandle(
            (handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32
        )

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return multiply(self, widen(a), widen(b), *rest)

    interpreter.InterpreterBuilder.create_dot = create_dot


def _mend_rounding() -> None:
    """The interpreter cuts digits off where a GPU rounds to nearest."""
    builder = interpreter.InterpreterBuilder
    narrow_types = {
        tl.bfloat16: (torch.bfloat16, np.uint16),
        tl.float8e4nv: (torch.float8_e4m3fn, np.uint8),
    }

    def rounded(cast: Any) -> Any:
        def round_or_cast(self: Any, source: Any, target: Any, *rest: Any) -> Any:
            if source.dtype.scalar != tl.float32 or target.scalar not in narrow_types:
                return cast(self, source, target, *rest)
            torch_type, bits = narrow_types[target.scalar]
            wide = torch.from_numpy(np.ascontiguousarray(source.data))
            data = wide.to(torch_type).view(getattr(torch, np.dtype(bits).name)).numpy()
            return interpreter.TensorHandle(data, target.scalar)

        return round_or_cast

    for name in ("create_fp_trunc", "create_fp_to_fp"):
        setattr(builder, name, rounded(getattr(builder, name)))


def _mend_waiting() -> None:
    """A rank that waits for another looks at a counter again and again, on a core that the other
    one may need."""
    add = interpreter.InterpreterBuilder.create_atomic_rmw

    def add_and_yield(*given: Any) -> Any:
        os.sched_yield()
        return add(*given)

    interpreter.InterpreterBuilder.create_atomic_rmw = add_and_yield
