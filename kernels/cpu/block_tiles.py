"""Sixteen outputs of products with block weights, for a few rows of 8-bit activations at once, as LLVM code.

For each block of 32 inputs: an exact integer dot product, then the scales in float32, block after block in their order
along K. Every operation is rounded by itself, so bits depend neither on how many rows are computed together nor on the
instructions that the machine has for dot products of bytes. The order of bytes is `kernels.block_formats`'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ..block_activations import HALF_SUM_AT, ROW_BYTES, SCALE_AT, SCALED_SUM_AT, SUM_AT
from ..block_formats import BLOCK, FORMATS, TILE_ROWS, BlockFormat
from .lanes import F32, I64, rounded

_BYTES = 64
"""Of a vector."""
_FLOAT, _INT, _SHORT, _LONG, _BYTE = ir.FloatType(), ir.IntType(32), ir.IntType(16), ir.IntType(64), ir.IntType(8)
_FLOATS, _INTS, _SHORTS = (ir.VectorType(element, TILE_ROWS) for element in (_FLOAT, _INT, _SHORT))
_NARROW, _WIDE, _PACKED = ir.VectorType(_BYTE, TILE_ROWS), ir.VectorType(_SHORT, 32), ir.VectorType(_BYTE, _BYTES)


@dataclass(frozen=True, slots=True)
class _Code:
    """Writes operations on sixteen lanes."""

    builder: ir.IRBuilder
    features: str
    """Of the machine, as LLVM names them."""

    def constant(self, number: float, kind: ir.VectorType = _INTS) -> Any:
        return ir.Constant(kind, [number] * kind.count)

    def load(self, address: Any, offset: int, kind: ir.Type) -> Any:
        at = self.builder.add(address, ir.Constant(_LONG, offset))
        return self.builder.load(self.builder.inttoptr(at, kind.as_pointer()), align=1)

    def spread(self, x: Any, kind: ir.VectorType) -> Any:
        first = self.builder.insert_element(ir.Constant(kind, ir.Undefined), x, ir.Constant(_INT, 0))
        zeros = ir.Constant(ir.VectorType(_INT, kind.count), [0] * kind.count)
        return self.builder.shuffle_vector(first, first, zeros)

    def one_of(self, x: Any, is_own: Any) -> Any:
        """The lane for which `is_own` is set. LLVM 22 aborts where it meets an index that is no constant instead."""
        bits = self.builder.select(is_own, self.builder.bitcast(x, _INTS), self.constant(0))
        name = f"llvm.vector.reduce.or.v{TILE_ROWS}i32"
        function = self.builder.module.declare_intrinsic(name, (), ir.FunctionType(_INT, [_INTS]))
        return self.builder.bitcast(self.builder.call(function, [bits]), x.type.element)

    def halves(self, address: Any, offset: int) -> Any:
        """Sixteen float16 numbers as float32."""
        if "+f16c" in self.features or "+fullfp16" in self.features:
            return self.builder.fpext(self.load(address, offset, ir.VectorType(ir.HalfType(), TILE_ROWS)), _FLOATS)
        bits = self.builder.zext(self.load(address, offset, _SHORTS), _INTS)
        sign = self.builder.shl(self.builder.and_(bits, self.constant(0x8000)), self.constant(16))
        rest = self.builder.shl(self.builder.and_(bits, self.constant(0x7FFF)), self.constant(13))
        # 2 ** 112 takes the exponent from float16's to float32's, of numbers below the normal ones too.
        scale = self.builder.bitcast(self.constant((127 + 112) << 23), _FLOATS)
        value = self.builder.fmul(self.builder.bitcast(rest, _FLOATS), scale)
        return self.builder.bitcast(self.builder.or_(self.builder.bitcast(value, _INTS), sign), _FLOATS)

    def bits(self, x: Any, shift: int, mask: int) -> Any:
        """Bits of each byte, shifted left or, where negative, right; the mask keeps neighbours out."""
        if shift > 0:
            x = self.builder.shl(x, self.constant(shift))
        elif shift < 0:
            x = self.builder.lshr(x, self.constant(-shift))
        return self.builder.and_(x, self.constant(mask * 0x01010101))

    def dot(self, total: Any, weights: Any, activations: Any) -> Any:
        """total + the dot product of four bytes in each lane: of weights 0…255, of activations -127…127."""
        if "+avx512vnni" in self.features:
            function = self.builder.module.declare_intrinsic(
                "llvm.x86.avx512.vpdpbusd.512", (), ir.FunctionType(_INTS, [_INTS, _PACKED, _PACKED])
            )
            values = [self.builder.bitcast(x, _PACKED) for x in (weights, activations)]
            return self.builder.call(function, [total, *values])
        b, eight = self.builder, self.constant(8, _WIDE)
        weights, activations = b.bitcast(weights, _WIDE), b.bitcast(activations, _WIDE)
        even = b.and_(weights, self.constant(255, _WIDE)), b.ashr(b.shl(activations, eight), eight)
        odd = b.lshr(weights, eight), b.ashr(activations, eight)
        return b.add(total, b.add(self._pairs(*even), self._pairs(*odd)))

    def _pairs(self, x: Any, y: Any) -> Any:
        """Sums of two neighbouring products of 16-bit numbers."""
        b, wide = self.builder, ir.VectorType(_INT, 32)
        product = b.mul(b.sext(x, wide), b.sext(y, wide))
        first, second = (
            b.shuffle_vector(product, product, ir.Constant(_INTS, list(range(at, 32, 2)))) for at in (0, 1)
        )
        return b.add(first, second)


@dataclass(frozen=True, slots=True)
class _Block:
    """What the rows share of a block of 32 inputs."""

    words: Sequence[Any]
    """Eight vectors: four inputs of each of the sixteen outputs."""
    scale: Any
    minimum: Any
    factors: Sequence[Any]
    """Of both halves in Q6_K, of the block in other nested formats."""
    min_factor: Any


def _blocks(code: _Code, address: Any, format: BlockFormat) -> Any:
    """The blocks of a unit, in their order."""
    scale = code.halves(address, 0)
    minimum = code.halves(address, 2 * TILE_ROWS) if format.has_min else None
    count = format.unit // BLOCK
    high_at = TILE_ROWS * format.scales
    high_bytes = 0 if format.bits == 8 else (format.bits - 4) * _BYTES
    low_at = high_at + high_bytes * count
    for block in range(count):
        words = _words(code, address, format, high_at + high_bytes * block, low_at, block)
        factors, min_factor = _factors(code, address, format, block) if format.is_nested else ((), None)
        yield _Block(words, scale, minimum, factors, min_factor)


def _words(code: _Code, address: Any, format: BlockFormat, high_at: int, low_at: int, block: int) -> list[Any]:
    if format.bits == 8:
        return [code.load(address, low_at + (8 * block + step) * _BYTES, _INTS) for step in range(8)]
    pairs = [code.load(address, low_at + (4 * block + i) * _BYTES, _INTS) for i in range(4)]
    words = [code.bits(pairs[step // 2], -4 * (step % 2), 15) for step in range(8)]
    if format.bits == 5:
        high = code.load(address, high_at, _INTS)
        words = [code.builder.or_(word, code.bits(high, 4 - step, 16)) for step, word in enumerate(words)]
    if format.bits == 6:
        both = [code.load(address, high_at + i * _BYTES, _INTS) for i in range(2)]
        words = [
            code.builder.or_(word, code.bits(both[step // 4], 4 - 2 * (step % 4), 48))
            for step, word in enumerate(words)
        ]
    return words


def _factors(code: _Code, address: Any, format: BlockFormat, block: int) -> tuple[Sequence[Any], Any]:
    """int32 factors of the block's scale and minimum."""
    b = code.builder
    if not format.has_min:
        at = 2 * TILE_ROWS
        return [b.sext(code.load(address, at + (2 * block + i) * TILE_ROWS, _NARROW), _INTS) for i in range(2)], None
    at = 4 * TILE_ROWS
    low = b.zext(code.load(address, at + block * TILE_ROWS, _NARROW), _INTS)
    high = b.zext(code.load(address, at + (8 + block // 2) * TILE_ROWS, _NARROW), _INTS)
    high = b.lshr(high, code.constant(4 * (block % 2)))
    scale = b.or_(b.and_(low, code.constant(15)), b.shl(b.and_(high, code.constant(3)), code.constant(4)))
    minimum = b.or_(b.lshr(low, code.constant(4)), b.shl(b.and_(high, code.constant(12)), code.constant(2)))
    return [scale], minimum


def _add_block(code: _Code, total: Any, block: _Block, address: Any, format: BlockFormat) -> Any:
    """total [16 outputs] + the product with one row's block."""
    b = code.builder

    def number(offset: int, kind: ir.Type) -> Any:
        return code.spread(code.load(address, offset, kind), ir.VectorType(kind, TILE_ROWS))

    def dot(steps: range, start: Any) -> Any:
        for step in steps:
            start = code.dot(start, block.words[step], number(4 * step, _INT))
        return start

    scale = b.fmul(block.scale, number(SCALE_AT, _FLOAT))
    if len(block.factors) == 2:
        offset, half, whole = code.constant(format.offset), number(HALF_SUM_AT, _INT), number(SUM_AT, _INT)
        zero = code.constant(0)
        starts = b.sub(zero, b.mul(half, offset)), b.sub(zero, b.mul(b.sub(whole, half), offset))
        parts = [dot(range(4 * i, 4 * i + 4), start) for i, start in enumerate(starts)]
        result = b.add(*(b.mul(part, factor) for part, factor in zip(parts, block.factors, strict=True)))
        return b.fadd(total, b.fmul(b.sitofp(result, _FLOATS), scale))
    start = code.constant(0)
    if format.offset:
        start = b.sub(start, b.mul(number(SUM_AT, _INT), code.constant(format.offset)))
    result = dot(range(8), start)
    if format.is_nested:
        result = b.mul(result, block.factors[0])
        minimum = b.sitofp(b.mul(number(SUM_AT, _INT), block.min_factor), _FLOATS)
        minimum = b.fmul(minimum, b.fmul(block.minimum, number(SCALE_AT, _FLOAT)))
        return b.fadd(total, b.fsub(b.fmul(b.sitofp(result, _FLOATS), scale), minimum))
    product = b.fmul(b.sitofp(result, _FLOATS), scale)
    if format.has_min:
        product = b.fadd(product, b.fmul(block.minimum, number(SCALED_SUM_AT, _FLOAT)))
    return b.fadd(total, product)


@intrinsic(prefer_literal=True)
def multiply_tile(
    typing: Any,
    tile: Any,
    units: Any,
    rows: Any,
    row_bytes: Any,
    out: Any,
    out_bytes: Any,
    num_outputs: Any,
    type_id: Any,
    num_rows: Any,
    element: Any,
) -> Any:
    """Stores the product of a tile, of so many units, with `num_rows` rows of activations, `row_bytes` apart.

    `out` is the address of the first row's first output, `out_bytes` what lies between rows of outputs. Of the sixteen
    outputs the first `num_outputs` are stored, all if it is greater. Constants: the format's type, the number of rows,
    and `element`, which names the type of outputs.
    """
    format = FORMATS[type_id.literal_value]

    def generate(context: Any, builder: ir.IRBuilder, __: Any, a: list[Any]) -> Any:
        code = _Code(builder, context.codegen().magic_tuple()[2])
        totals = _totals(code, format, num_rows.literal_value, *a[:4])
        for row, total in enumerate(totals):
            _store(code, total, builder.add(a[4], builder.mul(a[5], ir.Constant(_LONG, row))), a[6], element)
        return context.get_dummy_value()

    return types.void(I64, I64, I64, I64, I64, I64, I64, type_id, num_rows, element), generate


def _totals(
    code: _Code, format: BlockFormat, num_rows: int, tile: Any, units: Any, rows: Any, row_bytes: Any
) -> list[Any]:
    """The sixteen outputs of each row in float32."""
    b, blocks = code.builder, format.unit // BLOCK
    totals = [cgutils.alloca_once(b, _FLOATS) for _ in range(num_rows)]
    for total in totals:
        b.store(code.constant(0.0, _FLOATS), total)
    with cgutils.for_range(b, units, intp=_LONG) as loop:
        at = b.add(tile, b.mul(loop.index, ir.Constant(_LONG, TILE_ROWS * format.unit_bytes)))
        first = b.add(rows, b.mul(loop.index, ir.Constant(_LONG, blocks * ROW_BYTES)))
        for i, block in enumerate(_blocks(code, at, format)):
            address = b.add(first, ir.Constant(_LONG, i * ROW_BYTES))
            for total in totals:
                b.store(_add_block(code, b.load(total), block, address, format), total)
                address = b.add(address, row_bytes)
    return [b.load(total) for total in totals]


def _store(code: _Code, total: Any, address: Any, num_outputs: Any, element: Any) -> None:
    b = code.builder
    kind = _FLOATS if element == F32 else _SHORTS
    value = total if element == F32 else rounded(b, total, (_INTS, _SHORTS))
    size = 4 if element == F32 else 2
    with b.if_else(b.icmp_signed(">=", num_outputs, ir.Constant(_LONG, TILE_ROWS))) as (whole, part):
        with whole:
            b.store(value, b.inttoptr(address, kind.as_pointer()), align=size)
        with part:
            for lane in range(TILE_ROWS - 1):
                with b.if_then(b.icmp_signed("<", ir.Constant(_LONG, lane), num_outputs)):
                    at = b.add(address, ir.Constant(_LONG, lane * size))
                    one = b.extract_element(value, ir.Constant(_INT, lane))
                    b.store(one, b.inttoptr(at, kind.element.as_pointer()))


@intrinsic(prefer_literal=True)
def expand_row(typing: Any, tile: Any, units: Any, row: Any, out: Any, type_id: Any, element: Any) -> Any:
    """Stores one of a tile's sixteen rows, of so many units, as numbers in the type that `element` names."""
    format = FORMATS[type_id.literal_value]

    def generate(context: Any, builder: ir.IRBuilder, __: Any, a: list[Any]) -> Any:
        code = _Code(builder, context.codegen().magic_tuple()[2])
        size = 4 if element == F32 else 2
        lanes = ir.Constant(_INTS, list(range(TILE_ROWS)))
        is_own = builder.icmp_unsigned("==", lanes, code.spread(builder.trunc(a[2], _INT), _INTS))
        with cgutils.for_range(builder, a[1], intp=_LONG) as loop:
            at = builder.add(a[0], builder.mul(loop.index, ir.Constant(_LONG, TILE_ROWS * format.unit_bytes)))
            first = builder.add(a[3], builder.mul(loop.index, ir.Constant(_LONG, format.unit * size)))
            for i, block in enumerate(_blocks(code, at, format)):
                for half in range(2):
                    values = _expanded(code, block, half, is_own, format)
                    p_half = builder.add(first, ir.Constant(_LONG, (2 * i + half) * TILE_ROWS * size))
                    _store(code, values, p_half, ir.Constant(_LONG, TILE_ROWS), element)
        return context.get_dummy_value()

    return types.void(I64, I64, I64, I64, type_id, element), generate


def _expanded(code: _Code, block: _Block, half: int, is_own: Any, format: BlockFormat) -> Any:
    """Sixteen successive weights of one of the tile's rows, in the order of operations of `block_formats.expand`."""
    b = code.builder
    words = ir.Constant(ir.VectorType(_INT, 4), ir.Undefined)
    for step in range(4):
        word = code.one_of(block.words[4 * half + step], is_own)
        words = b.insert_element(words, word, ir.Constant(_INT, step))
    values = b.sub(b.zext(b.bitcast(words, _NARROW), _INTS), code.constant(format.offset))
    scale, minimum = block.scale, block.minimum
    if block.factors:
        scale = b.fmul(scale, b.sitofp(block.factors[half % len(block.factors)], _FLOATS))
    product = b.fmul(b.sitofp(values, _FLOATS), code.spread(code.one_of(scale, is_own), _FLOATS))
    if minimum is None:
        return product
    if block.min_factor is not None:
        minimum = b.fmul(minimum, b.sitofp(block.min_factor, _FLOATS))
    combine = b.fsub if format.is_nested else b.fadd
    return combine(product, code.spread(code.one_of(minimum, is_own), _FLOATS))
