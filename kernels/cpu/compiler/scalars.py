"""Single numbers in memory, in functions that numba compiles. Addresses are int64, in bytes;
nothing checks bounds."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import carray, njit, types
from numba.extending import intrinsic

from .simd_types import F32, FLOAT, I64, INT, LONG, SHORT, pointer, rounded


@intrinsic
def size_of(typing: Any, element: Any) -> Any:
    """Size of an element in bytes."""
    return I64(element), lambda *_: ir.Constant(LONG, element.bitwidth // 8)


@intrinsic
def float32_at(typing: Any, address: Any) -> Any:
    return F32(I64), lambda _, builder, __, a: builder.load(pointer(builder, a[0], FLOAT))


@intrinsic
def number_at(typing: Any, address: Any, element: Any) -> Any:
    """One element of the type that `element` names."""

    def generate(_: Any, builder: ir.IRBuilder, __: Any, a: list[Any]) -> Any:
        if element == F32:
            return builder.load(pointer(builder, a[0], FLOAT))
        bits = builder.zext(builder.load(pointer(builder, a[0], SHORT), align=2), INT)
        return builder.bitcast(builder.shl(bits, ir.Constant(INT, 16)), FLOAT)

    return F32(I64, element), generate


@intrinsic
def put(typing: Any, address: Any, x: Any, element: Any) -> Any:
    """Stores one number as an element of that type."""

    def generate(context: Any, builder: ir.IRBuilder, __: Any, a: list[Any]) -> Any:
        if element == F32:
            builder.store(a[1], pointer(builder, a[0], FLOAT))
        else:
            builder.store(rounded(builder, a[1], (INT, SHORT)), pointer(builder, a[0], SHORT))
        return context.get_dummy_value()

    return types.void(I64, F32, element), generate


@intrinsic
def int32_at(typing: Any, address: Any) -> Any:
    return I64(I64), lambda _, builder, __, a: builder.sext(
        builder.load(pointer(builder, a[0], INT)), LONG
    )


@intrinsic
def int64_at(typing: Any, address: Any) -> Any:
    return I64(I64), lambda _, builder, __, a: builder.load(pointer(builder, a[0], LONG))


@intrinsic
def _int32_pointer(typing: Any, address: Any) -> Any:
    kind = types.CPointer(types.int32)
    return kind(I64), lambda _, builder, __, a: pointer(builder, a[0], INT)


@njit
def int32_array_at(address: int, shape: Any) -> Any:
    """The numbers at an address, as an array."""
    return carray(_int32_pointer(address), shape)


@intrinsic
def has_bits(typing: Any, address: Any) -> Any:
    """Whether any of the 16 bits at an address is set."""

    def generate(_: Any, builder: ir.IRBuilder, __: Any, a: list[Any]) -> Any:
        return builder.icmp_unsigned(
            "!=", builder.load(pointer(builder, a[0], SHORT), align=2), ir.Constant(SHORT, 0)
        )

    return types.boolean(I64), generate


@intrinsic
def take_one(typing: Any, address: Any) -> Any:
    """Increments an int64 atomically and returns its old value."""

    def generate(_: Any, builder: ir.IRBuilder, __: Any, a: list[Any]) -> Any:
        return builder.atomic_rmw(
            "add", pointer(builder, a[0], LONG), ir.Constant(LONG, 1), "monotonic"
        )

    return I64(I64), generate


@intrinsic
def put_int32(typing: Any, address: Any, x: Any) -> Any:
    def generate(context: Any, builder: ir.IRBuilder, __: Any, a: list[Any]) -> Any:
        builder.store(builder.trunc(a[1], INT), pointer(builder, a[0], INT))
        return context.get_dummy_value()

    return types.void(I64, I64), generate


@intrinsic
def put_int64(typing: Any, address: Any, x: Any) -> Any:
    def generate(context: Any, builder: ir.IRBuilder, __: Any, a: list[Any]) -> Any:
        builder.store(a[1], pointer(builder, a[0], LONG))
        return context.get_dummy_value()

    return types.void(I64, I64), generate


@intrinsic
def ask_for_line(typing: Any, address: Any) -> Any:
    """Prefetches the cache line of an address; the address may be outside of any memory."""

    def generate(context: Any, builder: ir.IRBuilder, __: Any, a: list[Any]) -> Any:
        kinds = [ir.PointerType(ir.IntType(8)), INT, INT, INT]
        function = builder.module.declare_intrinsic(
            "llvm.prefetch.p0", (), ir.FunctionType(ir.VoidType(), kinds)
        )
        read, nearest_cache, data = (ir.Constant(INT, number) for number in (0, 3, 1))
        builder.call(function, [pointer(builder, a[0], ir.IntType(8)), read, nearest_cache, data])
        return context.get_dummy_value()

    return types.void(I64), generate
