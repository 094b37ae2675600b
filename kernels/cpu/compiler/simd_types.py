"""Types of sixteen float32 numbers or 32-bit words, in functions that numba compiles, and their
parts in LLVM code."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import models, register_model

NUM_LANES = 16
FLOAT = ir.FloatType()
INT = ir.IntType(32)
SHORT = ir.IntType(16)
LONG = ir.IntType(64)
FLOATS, INTS, SHORTS = (ir.VectorType(element, NUM_LANES) for element in (FLOAT, INT, SHORT))


class Lanes(types.Type):  # type: ignore[misc]  # numba ships no types
    """Numba's type of sixteen float32 numbers."""

    def __init__(self) -> None:
        super().__init__(name="Lanes")


@register_model(Lanes)
class _LanesModel(models.PrimitiveModel):  # type: ignore[misc]  # as above
    def __init__(self, manager: Any, lanes: Lanes) -> None:
        super().__init__(manager, lanes, FLOATS)


class Words(types.Type):  # type: ignore[misc]  # as above
    """Numba's type of sixteen 32-bit words; arithmetic wraps."""

    def __init__(self) -> None:
        super().__init__(name="Words")


@register_model(Words)
class _WordsModel(models.PrimitiveModel):  # type: ignore[misc]  # as above
    def __init__(self, manager: Any, words: Words) -> None:
        super().__init__(manager, words, INTS)


LANES = Lanes()
WORDS = Words()
I64 = types.int64
F32 = types.float32
F32_ELEMENT = np.float32(0)
BF16_ELEMENT = np.uint16(0)
"""Values whose type names the type of elements in memory: an operation is compiled for the type of
such a value."""


def pointer(builder: ir.IRBuilder, address: Any, kind: ir.Type) -> Any:
    """Address, an int64, as a pointer to a value of an LLVM type."""
    return builder.inttoptr(address, kind.as_pointer())


def filled(kind: ir.VectorType, value: float) -> Any:
    """Constant vector with one value in every lane."""
    return ir.Constant(kind, [value] * NUM_LANES)


def broadcast(builder: ir.IRBuilder, x: Any, kind: ir.VectorType) -> Any:
    """Vector with x in every lane."""
    first = builder.insert_element(ir.Constant(kind, ir.Undefined), x, ir.Constant(INT, 0))
    return builder.shuffle_vector(first, first, filled(INTS, 0))


def rounded(builder: ir.IRBuilder, value: Any, kinds: tuple[Any, Any]) -> Any:
    """Rounds float32 to the upper half of its bits, to nearest, ties to even."""
    wide, narrow = kinds
    is_vector = isinstance(wide, ir.VectorType)

    def constant(number: int) -> Any:
        return filled(wide, number) if is_vector else ir.Constant(wide, number)

    bits = builder.bitcast(value, wide)
    odd = builder.and_(builder.lshr(bits, constant(16)), constant(1))
    bits = builder.add(bits, builder.add(odd, constant(0x7FFF)))
    return builder.trunc(builder.lshr(bits, constant(16)), narrow)
