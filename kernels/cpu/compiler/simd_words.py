"""Operations on sixteen 32-bit words, in functions that numba compiles; arithmetic wraps."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.extending import intrinsic

from .simd_types import FLOATS, I64, INT, INTS, LANES, NUM_LANES, WORDS, broadcast


@intrinsic
def words_from(typing: Any, start: Any) -> Any:
    """start, start + 1, …"""

    def generate(_: Any, builder: ir.IRBuilder, __: Any, a: list[Any]) -> Any:
        start = broadcast(builder, builder.trunc(a[0], INT), INTS)
        return builder.add(start, ir.Constant(INTS, list(range(NUM_LANES))))

    return WORDS(I64), generate


@intrinsic
def splat_word(typing: Any, x: Any) -> Any:
    return WORDS(I64), lambda _, builder, __, a: broadcast(builder, builder.trunc(a[0], INT), INTS)


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
        a[0], broadcast(builder, builder.trunc(a[1], INT), INTS)
    )


@intrinsic
def numbers_of(typing: Any, x: Any) -> Any:
    """Unsigned words as float32."""
    return LANES(WORDS), lambda _, builder, __, a: builder.uitofp(a[0], FLOATS)
