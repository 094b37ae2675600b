"""Products of tiles of matrices as LLVM code, in functions that numba compiles.

Tiles are made of 32-bit words: one float32, or two bfloat16 that are neighbours along the inner
dimension. Those of bfloat16 are multiplied by AMX, which sums in float32. A result's bits depend on
its own row and column alone. Addresses are int64, in bytes; nothing checks bounds.
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.registry import cpu_target
from numba.extending import intrinsic

from ..compiler.simd_types import (
    F32,
    FLOAT,
    FLOATS,
    I64,
    INTS,
    LANES,
    LONG,
    NUM_LANES,
    broadcast,
    filled,
    pointer,
)

TILE_ROWS = 16
TILE_COLUMNS = 32
"""Rows and columns of the result of `multiply_words`."""
COLUMN_BYTES = TILE_COLUMNS * 4
"""Bytes from a word of a column to the next one."""
WORDS_AT_ONCE = 16
"""Numbers of words of a row or a column are multiples of it."""
CONFIG_BYTES = 64
"""Bytes of a configuration of AMX."""
_ROWS_IN_REGISTERS = 8
"""Rows of a product whose sums fill half of the vector registers."""
_VECTORS = range(0, COLUMN_BYTES, NUM_LANES * 4)
"""Offsets in bytes of the vectors of a row of columns."""
_BYTE = ir.IntType(8)
_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XTILEDATA = 158, 0x1023, 18
"""Numbers by which a process asks Linux on x86-64 for AMX's registers."""


@cache
def has_amx() -> bool:
    """Whether this machine multiplies tiles of bfloat16, and the system lets this process do so."""
    features = cpu_target.target_context.codegen().magic_tuple()[2].split(",")
    if sys.platform != "linux" or not {"+amx-tile", "+amx-bf16"} <= {*features}:
        return False
    syscall = ctypes.CDLL(None).syscall
    refused = syscall(
        *(ctypes.c_long(each) for each in (_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XTILEDATA))
    )
    return not refused


@intrinsic
def multiply_words(
    typing: Any,
    rows: Any,
    row_bytes: Any,
    columns: Any,
    num_words: Any,
    out: Any,
    out_bytes: Any,
    is_first: Any,
    element: Any,
) -> Any:
    """Multiplies `TILE_ROWS` rows of words, `row_bytes` apart, by `TILE_COLUMNS` columns, of which
    word i lies at `columns` + i x `COLUMN_BYTES`. The product is added to float32 results, whose
    rows lie `out_bytes` apart, or written over them if `is_first`."""

    def generate(context: Any, builder: ir.IRBuilder, __: Any, a: list[Any]) -> Any:
        if element == F32:
            for first in range(0, TILE_ROWS, _ROWS_IN_REGISTERS):
                _multiply_floats(builder, first, *a[:7])
        else:
            _multiply_pairs(builder, *a[:7])
        return context.get_dummy_value()

    return types.void(I64, I64, I64, I64, I64, I64, types.boolean, element), generate


def _at(builder: ir.IRBuilder, base: Any, stride: Any, index: Any, offset: int = 0) -> Any:
    """The address base + stride x index + offset, of which the index may be a Python number."""
    if isinstance(index, int):
        index = ir.Constant(LONG, index)
    if isinstance(stride, int):
        stride = ir.Constant(LONG, stride)
    address = builder.add(base, builder.mul(stride, index))
    return builder.add(address, ir.Constant(LONG, offset))


def _load(builder: ir.IRBuilder, address: Any, kind: ir.Type = FLOATS) -> Any:
    return builder.load(pointer(builder, address, kind), align=4)


def _multiply_floats(
    builder: ir.IRBuilder,
    first_row: int,
    p_rows: Any,
    row_bytes: Any,
    p_columns: Any,
    num_words: Any,
    p_out: Any,
    out_bytes: Any,
    is_first: Any,
) -> None:
    """Some rows of a product of float32 words, which are added in their order."""
    rows = range(first_row, first_row + _ROWS_IN_REGISTERS)
    results = [_at(builder, p_out, out_bytes, i, offset) for i in rows for offset in _VECTORS]
    sums = [cgutils.alloca_once(builder, FLOATS) for _ in results]
    with builder.if_else(is_first) as (first, rest):
        with first:
            for total in sums:
                builder.store(filled(FLOATS, 0.0), total)
        with rest:
            for total, result in zip(sums, results, strict=True):
                builder.store(_load(builder, result), total)
    fma = builder.module.declare_intrinsic(
        f"llvm.fma.v{NUM_LANES}f32", (), ir.FunctionType(FLOATS, [FLOATS] * 3)
    )
    with cgutils.for_range(builder, num_words, intp=LONG) as loop:
        columns = [
            _load(builder, _at(builder, p_columns, COLUMN_BYTES, loop.index, offset))
            for offset in _VECTORS
        ]
        p_word = _at(builder, p_rows, 4, loop.index)
        for i, row in enumerate(rows):
            word = _load(builder, _at(builder, p_word, row_bytes, row), FLOAT)
            words = broadcast(builder, word, FLOATS)
            for j, column in enumerate(columns):
                total = sums[i * len(columns) + j]
                builder.store(builder.call(fma, [words, column, builder.load(total)]), total)
    for total, result in zip(sums, results, strict=True):
        builder.store(builder.load(total), pointer(builder, result, FLOATS), align=4)


def _call_amx(
    builder: ir.IRBuilder, name: str, tiles: tuple[int, ...], memory: tuple[Any, ...] = ()
) -> None:
    """Calls an operation on tiles of registers, and on memory: an address and the distance of
    rows, if any."""
    byte_pointer = _BYTE.as_pointer()
    kinds = [*[_BYTE] * len(tiles), *[byte_pointer, LONG][: len(memory)]]
    function = builder.module.declare_intrinsic(
        f"llvm.x86.{name}", (), ir.FunctionType(ir.VoidType(), kinds)
    )
    values = [ir.Constant(_BYTE, tile) for tile in tiles]
    values += [builder.inttoptr(each, byte_pointer) for each in memory[:1]]
    builder.call(function, [*values, *memory[1:]])


def _multiply_pairs(
    builder: ir.IRBuilder,
    p_rows: Any,
    row_bytes: Any,
    p_columns: Any,
    num_words: Any,
    p_out: Any,
    out_bytes: Any,
    is_first: Any,
) -> None:
    """A product of words of two bfloat16, by AMX: two tiles of results, one of rows and two of
    columns."""
    results = (0, 1)
    columns = (2, 3)
    rows = 4
    with builder.if_else(is_first) as (first, rest):
        with first:
            for tile in results:
                _call_amx(builder, "tilezero", (tile,))
        with rest:
            for tile, offset in zip(results, _VECTORS, strict=True):
                memory = (_at(builder, p_out, 0, 0, offset), out_bytes)
                _call_amx(builder, "tileloadd64", (tile,), memory)
    step = ir.Constant(LONG, WORDS_AT_ONCE)
    with cgutils.for_range(builder, builder.udiv(num_words, step), intp=LONG) as loop:
        memory = (_at(builder, p_rows, 4 * WORDS_AT_ONCE, loop.index), row_bytes)
        _call_amx(builder, "tileloadd64", (rows,), memory)
        for tile, column, offset in zip(results, columns, _VECTORS, strict=True):
            at = _at(builder, p_columns, COLUMN_BYTES * WORDS_AT_ONCE, loop.index, offset)
            memory = (at, ir.Constant(LONG, COLUMN_BYTES))
            _call_amx(builder, "tileloadd64", (column,), memory)
            _call_amx(builder, "tdpbf16ps", (tile, rows, column))
    for tile, offset in zip(results, _VECTORS, strict=True):
        memory = (_at(builder, p_out, 0, 0, offset), out_bytes)
        _call_amx(builder, "tilestored64", (tile,), memory)


@intrinsic
def configure_tiles(typing: Any, memory: Any, element: Any) -> Any:
    """Prepares this thread for products of an element's words, and keeps its configuration before,
    which another library may rely on, in `CONFIG_BYTES` of memory. As many bytes behind them are
    overwritten."""

    def generate(context: Any, builder: ir.IRBuilder, __: Any, a: list[Any]) -> Any:
        if element != F32:
            _call_amx(builder, "sttilecfg", (), (a[0],))
            # Palette 1; 64 bytes in each row of a tile from byte 16 on, 16 rows from byte 48 on.
            columns = [byte for _ in range(8) for byte in (64, 0)]
            config = [1, *[0] * 15, *columns, *[0] * 16, *[TILE_ROWS] * 8, *[0] * 8]
            kind = ir.VectorType(_BYTE, CONFIG_BYTES)
            at = _at(builder, a[0], 0, 0, CONFIG_BYTES)
            builder.store(ir.Constant(kind, config), pointer(builder, at, kind), align=1)
            _call_amx(builder, "ldtilecfg", (), (at,))
        return context.get_dummy_value()

    return types.void(I64, element), generate


@intrinsic
def restore_tiles(typing: Any, memory: Any, element: Any) -> Any:
    """Restores the configuration that `configure_tiles` has kept in memory."""

    def generate(context: Any, builder: ir.IRBuilder, __: Any, a: list[Any]) -> Any:
        if element != F32:
            _call_amx(builder, "ldtilecfg", (), (a[0],))
        return context.get_dummy_value()

    return types.void(I64, element), generate


@intrinsic
def transpose_words(typing: Any, rows: Any, row_bytes: Any, out: Any) -> Any:
    """Writes sixteen rows of sixteen words, `row_bytes` apart, as columns of `multiply_words`."""

    def generate(context: Any, builder: ir.IRBuilder, __: Any, a: list[Any]) -> Any:
        words = [_load(builder, _at(builder, a[0], a[1], i)) for i in range(NUM_LANES)]
        half = NUM_LANES // 2
        # Four perfect shuffles of all words.
        pairs = [
            ir.Constant(INTS, [first + i // 2 + i % 2 * NUM_LANES for i in range(NUM_LANES)])
            for first in (0, half)
        ]
        for _ in range(4):
            words = [
                builder.shuffle_vector(words[i // 2], words[i // 2 + half], pairs[i % 2])
                for i in range(NUM_LANES)
            ]
        for i, each in enumerate(words):
            at = _at(builder, a[2], COLUMN_BYTES, i)
            builder.store(each, pointer(builder, at, FLOATS), align=4)
        return context.get_dummy_value()

    return types.void(I64, I64, I64), generate


@intrinsic
def joined_halves(typing: Any, x: Any, y: Any) -> Any:
    """Words of two bfloat16 numbers that were loaded as float32: x in the lower half."""

    def generate(_: Any, builder: ir.IRBuilder, __: Any, a: list[Any]) -> Any:
        low, high = (builder.bitcast(each, INTS) for each in a)
        low = builder.lshr(low, filled(INTS, 16))
        return builder.bitcast(builder.or_(low, high), FLOATS)

    return LANES(LANES, LANES), generate
