"""Keeps what Triton 3.6's interpreter would make again for each operation and each call of a
function on the device.

It was three quarters of the interpreter's time (2026-11-26). Results are the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache, lru_cache
from typing import Any

import triton.language as tl
from triton._utils import validate_block_shape
from triton.language import core
from triton.runtime import interpreter


def quicken() -> None:
    _patch_language_once()
    _keep_sizes_of_blocks()
    _compare_sizes_alone()
    _keep_types_of_arrays()
    _look_for_no_overflow()
    _unwrap_at_once()


def _patch_language_once() -> None:
    """A launch replaces 400 functions of `triton.language`, and so does each call of a function on
    the device, such as `tl.sum`. Here they are replaced once and stay: a process that interprets
    kernels compiles none."""
    patch = interpreter._patch_lang
    patched: set[int] = set()

    @cache
    def patch_for(function: Callable[..., Any]) -> None:
        modules = {id(each) for each in function.__globals__.values() if each is tl or each is core}
        if not modules or not modules <= patched:
            # The scope that it returns would undo the changes.
            patch(function)
            patched.update(modules)

    def patch_once(function: Callable[..., Any]) -> Any:
        patch_for(function)
        return interpreter._LangPatchScope()

    interpreter._patch_lang = patch_once


def _keep_sizes_of_blocks() -> None:
    """Types of blocks, and tensors, hold their sizes as tuples of Triton's, which are made once for
    equal sizes."""

    def constants_of(shape: Any) -> tuple[Any, Any]:
        return core.constexpr(math.prod(shape)), core.tuple(
            [core.constexpr(size) for size in shape]
        )

    # Sizes of another type, such as 2.0, are refused: they are not looked up as those that are
    # equal to them.
    @lru_cache(maxsize=None, typed=True)
    def sizes_of(*sizes: int) -> tuple[Any, str, int, tuple[Any, Any]]:
        if not sizes:
            raise TypeError("0d block_type is forbidden")
        shape = core.tuple(sizes)
        return shape, str(shape), validate_block_shape(shape), constants_of(shape)

    def init_block(self: Any, element_ty: Any, shape: Any) -> None:
        assert isinstance(shape, list | core.tuple)
        self.element_ty = element_ty
        self.shape, text, self.numel, self.constants = sizes_of(
            *map(core._unwrap_if_constexpr, shape)
        )
        self.name = f"<{text}, {element_ty}>"

    of_a_scalar = constants_of(())

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle = handle
        self.type = type
        self.dtype = type.scalar
        self.numel, self.shape = type.constants if type.is_block() else of_a_scalar

    core.block_type.__init__ = init_block
    core.tensor.__init__ = init_tensor


def _compare_sizes_alone() -> None:
    """A tuple of Triton's is compared with a list, without a tuple of the list and its type."""
    is_equal = core.tuple.__eq__

    def is_equal_to(self: Any, other: Any) -> Any:
        if isinstance(other, list | tuple | core.tuple):
            return core.constexpr(
                self.values == [core._unwrap_if_constexpr(each) for each in other]
            )
        return is_equal(self, other)

    core.tuple.__eq__ = is_equal_to


def _keep_types_of_arrays() -> None:
    """The table from Triton's types to numpy's is made once, and not for each look into it."""
    numpy_type = cache(interpreter._get_np_dtype)
    address = interpreter._get_np_dtype(core.pointer_type(tl.int8))

    def numpy_type_of(type: Any) -> Any:
        scalar = type.scalar
        return address if scalar.is_ptr() else numpy_type(scalar)

    interpreter._get_np_dtype = numpy_type_of


def _look_for_no_overflow() -> None:
    """Turns checks of integer overflow off unless `debug` is on: without it Triton computes them
    and asserts none."""
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=builder.options.debug)


def _unwrap_at_once() -> None:
    """Most of what may be a constant is none, and no tuple of them."""
    unwrap = core._unwrap_if_constexpr
    plain = {int, bool, float, str, core.dtype, core.block_type, core.pointer_type, core.tensor}

    def unwrap_at_once(value: Any) -> Any:
        kind = type(value)
        if kind in plain:
            return value
        return value.value if kind is core.constexpr else unwrap(value)

    core._unwrap_if_constexpr = unwrap_at_once
