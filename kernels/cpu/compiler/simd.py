"""Operations on sixteen float32 numbers, in functions that numba compiles: the base of kernels for
CPUs.

Addresses are int64, in bytes, as in C; nothing here checks bounds. Every operation is rounded by
itself in the order in which it is written, however wide the machine's registers are, so a kernel's
bits do not depend on how it was compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from .simd_types import (
    F32,
    FLOATS,
    I64,
    INT,
    INTS,
    LANES,
    NUM_LANES,
    SHORT,
    SHORTS,
    broadcast,
    filled,
    pointer,
    rounded,
)


def _call(builder: ir.IRBuilder, name: str, values: list[Any]) -> Any:
    """Calls an operation that every target of LLVM has for vectors of any width."""
    kind = values[0].type
    suffix = f"v{NUM_LANES}f32" if kind == FLOATS else "f32"
    function = builder.module.declare_intrinsic(
        f"llvm.{name}.{suffix}", (), ir.FunctionType(kind, [kind] * len(values))
    )
    return builder.call(function, values)


@intrinsic
def load(typing: Any, address: Any, element: Any) -> Any:
    """Sixteen successive elements of the type that `element` (`F32_ELEMENT` or `BF16_ELEMENT`)
    names."""

    def generate(_: Any, builder: ir.IRBuilder, __: Any, a: list[Any]) -> Any:
        if element == F32:
            return builder.load(pointer(builder, a[0], FLOATS), align=4)
        bits = builder.zext(builder.load(pointer(builder, a[0], SHORTS), align=2), INTS)
        return builder.bitcast(builder.shl(bits, filled(INTS, 16)), FLOATS)

    return LANES(I64, element), generate


@intrinsic
def store(typing: Any, address: Any, x: Any, element: Any) -> Any:
    def generate(context: Any, builder: ir.IRBuilder, __: Any, a: list[Any]) -> Any:
        if element == F32:
            builder.store(a[1], pointer(builder, a[0], FLOATS), align=4)
        else:
            builder.store(
                rounded(builder, a[1], (INTS, SHORTS)), pointer(builder, a[0], SHORTS), align=2
            )
        return context.get_dummy_value()

    return types.void(I64, LANES, element), generate


@intrinsic
def splat(typing: Any, x: Any) -> Any:
    """Vector with one number in every lane."""
    return LANES(F32), lambda _, builder, __, a: broadcast(builder, a[0], FLOATS)


def _of_two(generate: Callable[[Any, Any, Any], Any]) -> Any:
    """The operation on two vectors for which LLVM's code is generated from a builder and both."""

    @intrinsic
    def operation(typing: Any, x: Any, y: Any) -> Any:
        return LANES(LANES, LANES), lambda _, builder, __, a: generate(builder, a[0], a[1])

    return operation


add = _of_two(lambda builder, x, y: builder.fadd(x, y))
sub = _of_two(lambda builder, x, y: builder.fsub(x, y))
mul = _of_two(lambda builder, x, y: builder.fmul(x, y))
div = _of_two(lambda builder, x, y: builder.fdiv(x, y))
maximum = _of_two(lambda builder, x, y: _call(builder, "maxnum", [x, y]))
minimum = _of_two(lambda builder, x, y: _call(builder, "minnum", [x, y]))


@intrinsic
def fma(typing: Any, x: Any, y: Any, z: Any) -> Any:
    """x · y + z, rounded once."""
    return LANES(LANES, LANES, LANES), lambda _, builder, __, a: _call(builder, "fma", a)


@intrinsic
def nearest(typing: Any, x: Any) -> Any:
    """The nearest whole numbers."""
    return LANES(LANES), lambda _, builder, __, a: _call(builder, "roundeven", a)


@intrinsic
def keep_first(typing: Any, x: Any, count: Any, other: Any) -> Any:
    """The first `count` lanes of x, and `other` in the rest."""

    def generate(_: Any, builder: ir.IRBuilder, __: Any, a: list[Any]) -> Any:
        bound = broadcast(builder, builder.trunc(a[1], INT), INTS)
        kept = builder.icmp_signed("<", ir.Constant(INTS, list(range(NUM_LANES))), bound)
        return builder.select(kept, a[0], a[2])

    return LANES(LANES, I64, LANES), generate


@intrinsic
def keep_where(typing: Any, x: Any, address: Any, other: Any) -> Any:
    """The lanes of x whose bit is set in the 16 bits at an address, lowest first, and `other` in
    the rest."""

    def generate(_: Any, builder: ir.IRBuilder, __: Any, a: list[Any]) -> Any:
        bits = builder.load(pointer(builder, a[1], SHORT), align=2)
        kept = builder.bitcast(bits, ir.VectorType(ir.IntType(1), NUM_LANES))
        return builder.select(kept, a[0], a[2])

    return LANES(LANES, I64, LANES), generate


@intrinsic
def choose_below(typing: Any, x: Any, bound: Any, low: Any, high: Any) -> Any:
    """`low` where x < bound, else `high`."""
    return LANES(LANES, LANES, LANES, LANES), lambda _, builder, __, a: builder.select(
        builder.fcmp_ordered("<", a[0], a[1]), a[2], a[3]
    )


def _folded(builder: ir.IRBuilder, x: Any, combine: Any) -> Any:
    """Combines the halves of the lanes until one number is left."""
    width = NUM_LANES
    while width > 1:
        width //= 2
        upper = [ir.Constant(INT, i + width if i < width else 0) for i in range(NUM_LANES)]
        x = combine(x, builder.shuffle_vector(x, x, ir.Constant(INTS, upper)))
    return builder.extract_element(x, ir.Constant(INT, 0))


@intrinsic
def sum_of(typing: Any, x: Any) -> Any:
    return F32(LANES), lambda _, builder, __, a: _folded(builder, a[0], builder.fadd)


@intrinsic
def highest_of(typing: Any, x: Any) -> Any:
    return F32(LANES), lambda _, builder, __, a: _folded(
        builder, a[0], lambda low, high: _call(builder, "maxnum", [low, high])
    )
