"""Sixteen float32 numbers or 32-bit words at once, in functions that numba compiles: what kernels for CPUs are made of.

Addresses are int64, in bytes, as in C; nothing here checks bounds. Every operation is rounded by itself in the order in
which it is written, however wide the machine's registers are, so a kernel's bits do not depend on how it was compiled.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.extending import intrinsic, models, register_model

NUM_LANES = 16
_LOG2_E = 1.4426950408889634
_LN_2_HIGH, _LN_2_LOW = 0.693359375, -2.12194440e-4

_FLOAT, _INT, _SHORT, _LONG = ir.FloatType(), ir.IntType(32), ir.IntType(16), ir.IntType(64)
_FLOATS, _INTS, _SHORTS = (ir.VectorType(element, NUM_LANES) for element in (_FLOAT, _INT, _SHORT))


class Lanes(types.Type):  # type: ignore[misc]  # numba ships no types
    """Numba's type of sixteen float32 numbers."""

    def __init__(self) -> None:
        super().__init__(name="Lanes")


@register_model(Lanes)
class _LanesModel(models.PrimitiveModel):  # type: ignore[misc]  # as above
    def __init__(self, manager: Any, lanes: Lanes) -> None:
        super().__init__(manager, lanes, _FLOATS)


class Words(types.Type):  # type: ignore[misc]  # as above
    """Numba's type of sixteen 32-bit words; arithmetic wraps."""

    def __init__(self) -> None:
        super().__init__(name="Words")


@register_model(Words)
class _WordsModel(models.PrimitiveModel):  # type: ignore[misc]  # as above
    def __init__(self, manager: Any, words: Words) -> None:
        super().__init__(manager, words, _INTS)


LANES, WORDS = Lanes(), Words()
I64, F32 = types.int64, types.float32
F32_ELEMENT, BF16_ELEMENT = np.float32(0), np.uint16(0)
"""Values whose type names the type of elements in memory: an operation is compiled for the type of such a value."""


def _at(builder: ir.IRBuilder, address: Any, kind: ir.Type) -> Any:
    return builder.inttoptr(address, kind.as_pointer())


def _all(kind: ir.VectorType, value: float) -> Any:
    return ir.Constant(kind, [value] * NUM_LANES)


def _call(builder: ir.IRBuilder, name: str, values: list[Any]) -> Any:
    """Calls an operation that every target of LLVM has for vectors of any width."""
    kind = values[0].type
    suffix = f"v{NUM_LANES}f32" if kind == _FLOATS else "f32"
    function = builder.module.declare_intrinsic(
        f"llvm.{name}.{suffix}", (), ir.FunctionType(kind, [kind] * len(values))
    )
    return builder.call(function, values)


def rounded(builder: ir.IRBuilder, value: Any, kinds: tuple[Any, Any]) -> Any:
    """Rounds float32 to the upper half of its bits, to nearest, ties to even."""
    wide, narrow = kinds
    is_vector = isinstance(wide, ir.VectorType)

    def constant(number: int) -> Any:
        return _all(wide, number) if is_vector else ir.Constant(wide, number)

    bits = builder.bitcast(value, wide)
    odd = builder.and_(builder.lshr(bits, constant(16)), constant(1))
    bits = builder.add(bits, builder.add(odd, constant(0x7FFF)))
    return builder.trunc(builder.lshr(bits, constant(16)), narrow)


@intrinsic
def size_of(typing: Any, element: Any) -> Any:
    """Size of an element in bytes."""
    return I64(element), lambda *_: ir.Constant(_LONG, element.bitwidth // 8)


@intrinsic
def load(typing: Any, address: Any, element: Any) -> Any:
    """Sixteen successive elements of the type that `element` (`F32_ELEMENT` or `BF16_ELEMENT`) names."""

    def generate(_: Any, builder: ir.IRBuilder, __: Any, a: list[Any]) -> Any:
        if element == F32:
            return builder.load(_at(builder, a[0], _FLOATS), align=4)
        bits = builder.zext(builder.load(_at(builder, a[0], _SHORTS), align=2), _INTS)
        return builder.bitcast(builder.shl(bits, _all(_INTS, 16)), _FLOATS)

    return LANES(I64, element), generate


@intrinsic
def store(typing: Any, address: Any, x: Any, element: Any) -> Any:
    def generate(context: Any, builder: ir.IRBuilder, __: Any, a: list[Any]) -> Any:
        if element == F32:
            builder.store(a[1], _at(builder, a[0], _FLOATS), align=4)
        else:
            builder.store(rounded(builder, a[1], (_INTS, _SHORTS)), _at(builder, a[0], _SHORTS), align=2)
        return context.get_dummy_value()

    return types.void(I64, LANES, element), generate


def _spread(builder: ir.IRBuilder, x: Any, kind: ir.VectorType) -> Any:
    first = builder.insert_element(ir.Constant(kind, ir.Undefined), x, ir.Constant(_INT, 0))
    return builder.shuffle_vector(first, first, _all(_INTS, 0))


@intrinsic
def splat(typing: Any, x: Any) -> Any:
    """Vector with one number in every lane."""
    return LANES(F32), lambda _, builder, __, a: _spread(builder, a[0], _FLOATS)


@intrinsic
def add(typing: Any, x: Any, y: Any) -> Any:
    return LANES(LANES, LANES), lambda _, builder, __, a: builder.fadd(a[0], a[1])


@intrinsic
def sub(typing: Any, x: Any, y: Any) -> Any:
    return LANES(LANES, LANES), lambda _, builder, __, a: builder.fsub(a[0], a[1])


@intrinsic
def mul(typing: Any, x: Any, y: Any) -> Any:
    return LANES(LANES, LANES), lambda _, builder, __, a: builder.fmul(a[0], a[1])


@intrinsic
def div(typing: Any, x: Any, y: Any) -> Any:
    return LANES(LANES, LANES), lambda _, builder, __, a: builder.fdiv(a[0], a[1])


@intrinsic
def fma(typing: Any, x: Any, y: Any, z: Any) -> Any:
    """x · y + z, rounded once."""
    return LANES(LANES, LANES, LANES), lambda _, builder, __, a: _call(builder, "fma", a)


@intrinsic
def maximum(typing: Any, x: Any, y: Any) -> Any:
    return LANES(LANES, LANES), lambda _, builder, __, a: _call(builder, "maxnum", a)


@intrinsic
def minimum(typing: Any, x: Any, y: Any) -> Any:
    return LANES(LANES, LANES), lambda _, builder, __, a: _call(builder, "minnum", a)


@intrinsic
def nearest(typing: Any, x: Any) -> Any:
    """The nearest whole numbers."""
    return LANES(LANES), lambda _, builder, __, a: _call(builder, "roundeven", a)


@intrinsic
def power_of_two(typing: Any, x: Any) -> Any:
    """2 to the power of whole numbers −127 … 127; 2 ** −127 is 0."""

    def generate(_: Any, builder: ir.IRBuilder, __: Any, a: list[Any]) -> Any:
        exponent = builder.add(builder.fptosi(a[0], _INTS), _all(_INTS, 127))
        return builder.bitcast(builder.shl(exponent, _all(_INTS, 23)), _FLOATS)

    return LANES(LANES), generate


@intrinsic
def keep_first(typing: Any, x: Any, count: Any, other: Any) -> Any:
    """The first `count` lanes of x, and `other` in the rest."""

    def generate(_: Any, builder: ir.IRBuilder, __: Any, a: list[Any]) -> Any:
        bound = _spread(builder, builder.trunc(a[1], _INT), _INTS)
        kept = builder.icmp_signed("<", ir.Constant(_INTS, list(range(NUM_LANES))), bound)
        return builder.select(kept, a[0], a[2])

    return LANES(LANES, I64, LANES), generate


@intrinsic
def keep_where(typing: Any, x: Any, address: Any, other: Any) -> Any:
    """The lanes of x whose bit is set in the 16 bits at an address, lowest first, and `other` in the rest."""

    def generate(_: Any, builder: ir.IRBuilder, __: Any, a: list[Any]) -> Any:
        bits = builder.load(_at(builder, a[1], _SHORT), align=2)
        kept = builder.bitcast(bits, ir.VectorType(ir.IntType(1), NUM_LANES))
        return builder.select(kept, a[0], a[2])

    return LANES(LANES, I64, LANES), generate


def _folded(builder: ir.IRBuilder, x: Any, combine: Any) -> Any:
    """Combines the halves of the lanes until one number is left."""
    width = NUM_LANES
    while width > 1:
        width //= 2
        upper = [ir.Constant(_INT, i + width if i < width else 0) for i in range(NUM_LANES)]
        x = combine(x, builder.shuffle_vector(x, x, ir.Constant(_INTS, upper)))
    return builder.extract_element(x, ir.Constant(_INT, 0))


@intrinsic
def sum_of(typing: Any, x: Any) -> Any:
    return F32(LANES), lambda _, builder, __, a: _folded(builder, a[0], builder.fadd)


@intrinsic
def highest_of(typing: Any, x: Any) -> Any:
    return F32(LANES), lambda _, builder, __, a: _folded(
        builder, a[0], lambda low, high: _call(builder, "maxnum", [low, high])
    )


@intrinsic
def float32_at(typing: Any, address: Any) -> Any:
    return F32(I64), lambda _, builder, __, a: builder.load(_at(builder, a[0], _FLOAT))


@intrinsic
def put(typing: Any, address: Any, x: Any, element: Any) -> Any:
    """Stores one number as an element of that type."""

    def generate(context: Any, builder: ir.IRBuilder, __: Any, a: list[Any]) -> Any:
        if element == F32:
            builder.store(a[1], _at(builder, a[0], _FLOAT))
        else:
            builder.store(rounded(builder, a[1], (_INT, _SHORT)), _at(builder, a[0], _SHORT))
        return context.get_dummy_value()

    return types.void(I64, F32, element), generate


@intrinsic
def int32_at(typing: Any, address: Any) -> Any:
    return I64(I64), lambda _, builder, __, a: builder.sext(builder.load(_at(builder, a[0], _INT)), _LONG)


@intrinsic
def int64_at(typing: Any, address: Any) -> Any:
    return I64(I64), lambda _, builder, __, a: builder.load(_at(builder, a[0], _LONG))


@intrinsic
def _int32_pointer(typing: Any, address: Any) -> Any:
    kind = types.CPointer(types.int32)
    return kind(I64), lambda _, builder, __, a: _at(builder, a[0], _INT)


@njit
def int32_array_at(address: int, shape: Any) -> Any:
    """The numbers at an address, as an array."""
    return carray(_int32_pointer(address), shape)


@intrinsic
def has_bits(typing: Any, address: Any) -> Any:
    """Whether any of the 16 bits at an address is set."""

    def generate(_: Any, builder: ir.IRBuilder, __: Any, a: list[Any]) -> Any:
        return builder.icmp_unsigned("!=", builder.load(_at(builder, a[0], _SHORT), align=2), ir.Constant(_SHORT, 0))

    return types.boolean(I64), generate


@intrinsic
def take_one(typing: Any, address: Any) -> Any:
    """Increments an int64 atomically and returns its old value."""

    def generate(_: Any, builder: ir.IRBuilder, __: Any, a: list[Any]) -> Any:
        return builder.atomic_rmw("add", _at(builder, a[0], _LONG), ir.Constant(_LONG, 1), "monotonic")

    return I64(I64), generate


@intrinsic
def put_int32(typing: Any, address: Any, x: Any) -> Any:
    def generate(context: Any, builder: ir.IRBuilder, __: Any, a: list[Any]) -> Any:
        builder.store(builder.trunc(a[1], _INT), _at(builder, a[0], _INT))
        return context.get_dummy_value()

    return types.void(I64, I64), generate


@intrinsic
def choose_below(typing: Any, x: Any, bound: Any, low: Any, high: Any) -> Any:
    """`low` where x < bound, else `high`."""
    return LANES(LANES, LANES, LANES, LANES), lambda _, builder, __, a: builder.select(
        builder.fcmp_ordered("<", a[0], a[1]), a[2], a[3]
    )


@intrinsic
def words_from(typing: Any, start: Any) -> Any:
    """start, start + 1, …"""

    def generate(_: Any, builder: ir.IRBuilder, __: Any, a: list[Any]) -> Any:
        start = _spread(builder, builder.trunc(a[0], _INT), _INTS)
        return builder.add(start, ir.Constant(_INTS, list(range(NUM_LANES))))

    return WORDS(I64), generate


@intrinsic
def splat_word(typing: Any, x: Any) -> Any:
    return WORDS(I64), lambda _, builder, __, a: _spread(builder, builder.trunc(a[0], _INT), _INTS)


@intrinsic
def add_words(typing: Any, x: Any, y: Any) -> Any:
    return WORDS(WORDS, WORDS), lambda _, builder, __, a: builder.add(a[0], a[1])


@intrinsic
def mul_words(typing: Any, x: Any, y: Any) -> Any:
    return WORDS(WORDS, WORDS), lambda _, builder, __, a: builder.mul(a[0], a[1])


@intrinsic
def xor_words(typing: Any, x: Any, y: Any) -> Any:
    return WORDS(WORDS, WORDS), lambda _, builder, __, a: builder.xor(a[0], a[1])


@intrinsic
def shift_right(typing: Any, x: Any, count: Any) -> Any:
    """Words shifted right; zeros come in."""
    return WORDS(WORDS, I64), lambda _, builder, __, a: builder.lshr(
        a[0], _spread(builder, builder.trunc(a[1], _INT), _INTS)
    )


@intrinsic
def numbers_of(typing: Any, x: Any) -> Any:
    """Unsigned words as float32."""
    return LANES(WORDS), lambda _, builder, __, a: builder.uitofp(a[0], _FLOATS)


_BITS_OF_SQRT_HALF = 0x3F3504F3


@intrinsic
def exponent_of(typing: Any, x: Any) -> Any:
    """The exponent e of x = m · 2 ** e with m in [√½, √2), for normal x > 0."""

    def generate(_: Any, builder: ir.IRBuilder, __: Any, a: list[Any]) -> Any:
        bits = builder.sub(builder.bitcast(a[0], _INTS), _all(_INTS, _BITS_OF_SQRT_HALF))
        return builder.sitofp(builder.ashr(bits, _all(_INTS, 23)), _FLOATS)

    return LANES(LANES), generate


@intrinsic
def mantissa_of(typing: Any, x: Any) -> Any:
    """The mantissa m that belongs to `exponent_of`."""

    def generate(_: Any, builder: ir.IRBuilder, __: Any, a: list[Any]) -> Any:
        bits = builder.sub(builder.bitcast(a[0], _INTS), _all(_INTS, _BITS_OF_SQRT_HALF))
        bits = builder.add(builder.and_(bits, _all(_INTS, 0x007FFFFF)), _all(_INTS, _BITS_OF_SQRT_HALF))
        return builder.bitcast(bits, _FLOATS)

    return LANES(LANES), generate


@njit
def exp(x: Any) -> Any:
    """e to the power of x, relative error 2e-7; 0 below −88, and no higher than at 88."""
    x = minimum(maximum(x, splat(F32(-88.1))), splat(F32(88.0)))
    n = nearest(mul(x, splat(F32(_LOG2_E))))
    r = fma(n, splat(F32(-_LN_2_LOW)), fma(n, splat(F32(-_LN_2_HIGH)), x))
    # The polynomial of Cephes for |r| ≤ ln 2 / 2.
    p = fma(splat(F32(1.9875691500e-4)), r, splat(F32(1.3981999507e-3)))
    p = fma(p, r, splat(F32(8.3334519073e-3)))
    p = fma(p, r, splat(F32(4.1665795894e-2)))
    p = fma(p, r, splat(F32(1.6666665459e-1)))
    p = fma(p, r, splat(F32(5.0000001201e-1)))
    p = add(fma(mul(p, r), r, r), splat(F32(1.0)))
    return mul(p, power_of_two(n))


@njit
def log(x: Any) -> Any:
    """Natural logarithm of normal x > 0, absolute error 1e-6 below 100."""
    e, f = exponent_of(x), sub(mantissa_of(x), splat(F32(1.0)))
    # The polynomial of Cephes.
    p = fma(splat(F32(7.0376836292e-2)), f, splat(F32(-1.1514610310e-1)))
    p = fma(p, f, splat(F32(1.1676998740e-1)))
    p = fma(p, f, splat(F32(-1.2420140846e-1)))
    p = fma(p, f, splat(F32(1.4249322787e-1)))
    p = fma(p, f, splat(F32(-1.6668057665e-1)))
    p = fma(p, f, splat(F32(2.0000714765e-1)))
    p = fma(p, f, splat(F32(-2.4999993993e-1)))
    p = fma(p, f, splat(F32(3.3333331174e-1)))
    square = mul(f, f)
    p = fma(p, mul(square, f), mul(square, splat(F32(-0.5))))
    return fma(e, splat(F32(0.6931471805599453)), add(p, f))
