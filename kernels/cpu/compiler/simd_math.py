"""Powers and logarithms of sixteen float32 numbers, in functions that numba compiles."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import njit
from numba.extending import intrinsic

from .simd import add, choose_below, div, fma, maximum, minimum, mul, nearest, splat, sub
from .simd_types import F32, FLOATS, INTS, LANES, filled

_LOG2_E = 1.4426950408889634
_LN_2_HIGH = 0.693359375
_LN_2_LOW = -2.12194440e-4
_BITS_OF_SQRT_HALF = 0x3F3504F3


@intrinsic
def power_of_two(typing: Any, x: Any) -> Any:
    """2 to the power of whole numbers −127 … 127; 2 ** −127 is 0."""

    def generate(_: Any, builder: ir.IRBuilder, __: Any, a: list[Any]) -> Any:
        exponent = builder.add(builder.fptosi(a[0], INTS), filled(INTS, 127))
        return builder.bitcast(builder.shl(exponent, filled(INTS, 23)), FLOATS)

    return LANES(LANES), generate


@intrinsic
def exponent_of(typing: Any, x: Any) -> Any:
    """The exponent e of x = m · 2 ** e with m in [√½, √2), for normal x > 0."""

    def generate(_: Any, builder: ir.IRBuilder, __: Any, a: list[Any]) -> Any:
        bits = builder.sub(builder.bitcast(a[0], INTS), filled(INTS, _BITS_OF_SQRT_HALF))
        return builder.sitofp(builder.ashr(bits, filled(INTS, 23)), FLOATS)

    return LANES(LANES), generate


@intrinsic
def mantissa_of(typing: Any, x: Any) -> Any:
    """The mantissa m that belongs to `exponent_of`."""

    def generate(_: Any, builder: ir.IRBuilder, __: Any, a: list[Any]) -> Any:
        bits = builder.sub(builder.bitcast(a[0], INTS), filled(INTS, _BITS_OF_SQRT_HALF))
        bits = builder.add(
            builder.and_(bits, filled(INTS, 0x007FFFFF)), filled(INTS, _BITS_OF_SQRT_HALF)
        )
        return builder.bitcast(bits, FLOATS)

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
def tanh(x: Any) -> Any:
    """The hyperbolic tangent of x, absolute error 2e-7."""
    one = splat(F32(1))
    return sub(one, div(splat(F32(2)), add(one, exp(add(x, x)))))


@njit
def erf(x: Any) -> Any:
    """The error function of x, absolute error 2e-7. Source: Abramowitz and Stegun, 7.1.26."""
    one = splat(F32(1))
    size = maximum(x, sub(splat(F32(0)), x))
    t = div(one, fma(size, splat(F32(0.3275911)), one))
    total = splat(F32(1.061405429))
    total = fma(total, t, splat(F32(-1.453152027)))
    total = fma(total, t, splat(F32(1.421413741)))
    total = fma(total, t, splat(F32(-0.284496736)))
    total = mul(fma(total, t, splat(F32(0.254829592))), t)
    tail = mul(total, exp(sub(splat(F32(0)), mul(x, x))))
    return choose_below(x, splat(F32(0)), sub(tail, one), sub(one, tail))


@njit
def log(x: Any) -> Any:
    """Natural logarithm of normal x > 0, absolute error 1e-6 below 100."""
    e = exponent_of(x)
    f = sub(mantissa_of(x), splat(F32(1.0)))
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
