"""Sixteen outputs of products with packed weights and 8-bit activations, as LLVM code.

For each block of 32 inputs: an exact integer dot product, then the scales in float32, block after
block in their order along K. Every operation is rounded by itself, so bits depend neither on how
many rows are computed together nor on the instructions that the machine has for dot products of
bytes. Knows no order of bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from ..quant.block_activations import HALF_SUM_AT, SCALE_AT, SCALED_SUM_AT, SUM_AT
from ..quant.block_formats import TILE_ROWS
from .compiler.simd_types import F32, rounded

VECTOR_BYTES = 64
"""Number of bytes in a vector."""
FLOAT = ir.FloatType()
INT = ir.IntType(32)
SHORT = ir.IntType(16)
LONG = ir.IntType(64)
BYTE = ir.IntType(8)
FLOATS, INTS, SHORTS = (ir.VectorType(element, TILE_ROWS) for element in (FLOAT, INT, SHORT))
_HALF = ir.VectorType(BYTE, 32)
_HALF_PAIRS = ir.VectorType(SHORT, 16)
_HALF_INTS = ir.VectorType(INT, 8)
NARROW = ir.VectorType(BYTE, TILE_ROWS)
WIDE = ir.VectorType(SHORT, 32)
PACKED = ir.VectorType(BYTE, VECTOR_BYTES)


@dataclass(frozen=True, slots=True)
class TileCode:
    """Writes operations on sixteen lanes."""

    builder: ir.IRBuilder
    features: str
    """Features of the machine, as LLVM names them."""

    def constant(self, number: float, kind: ir.VectorType = INTS) -> Any:
        return ir.Constant(kind, [number] * kind.count)

    def load(self, address: Any, offset: int, kind: ir.Type) -> Any:
        at = self.builder.add(address, ir.Constant(LONG, offset))
        return self.builder.load(self.builder.inttoptr(at, kind.as_pointer()), align=1)

    def hidden(self, address: Any) -> Any:
        """The same address, hidden from the compiler, so that values are loaded from it here and
        not kept in registers from an earlier load."""
        kind = ir.FunctionType(LONG, [LONG])
        return self.builder.asm(kind, "", "=r,0", [address], side_effect=False)

    def broadcast(self, x: Any, kind: ir.VectorType) -> Any:
        first = self.builder.insert_element(ir.Constant(kind, ir.Undefined), x, ir.Constant(INT, 0))
        zeros = ir.Constant(ir.VectorType(INT, kind.count), [0] * kind.count)
        return self.builder.shuffle_vector(first, first, zeros)

    def one_of(self, x: Any, is_own: Any) -> Any:
        """The lane for which `is_own` is set. NOTE: extract_element with an index that is no
        constant makes LLVM 22 abort."""
        bits = self.builder.select(is_own, self.builder.bitcast(x, INTS), self.constant(0))
        name = f"llvm.vector.reduce.or.v{TILE_ROWS}i32"
        function = self.builder.module.declare_intrinsic(name, (), ir.FunctionType(INT, [INTS]))
        return self.builder.bitcast(self.builder.call(function, [bits]), x.type.element)

    def halves(self, address: Any, offset: int) -> Any:
        """Sixteen float16 numbers as float32."""
        if "+f16c" in self.features or "+fullfp16" in self.features:
            return self.builder.fpext(
                self.load(address, offset, ir.VectorType(ir.HalfType(), TILE_ROWS)), FLOATS
            )
        bits = self.builder.zext(self.load(address, offset, SHORTS), INTS)
        sign = self.builder.shl(self.builder.and_(bits, self.constant(0x8000)), self.constant(16))
        rest = self.builder.shl(self.builder.and_(bits, self.constant(0x7FFF)), self.constant(13))
        # 2 ** 112 takes the exponent from float16's to float32's, of numbers below the normal ones
        # too.
        scale = self.builder.bitcast(self.constant((127 + 112) << 23), FLOATS)
        value = self.builder.fmul(self.builder.bitcast(rest, FLOATS), scale)
        return self.builder.bitcast(
            self.builder.or_(self.builder.bitcast(value, INTS), sign), FLOATS
        )

    def brain_halves(self, address: Any, offset: int) -> Any:
        """Sixteen bfloat16 numbers as float32."""
        bits = self.builder.zext(self.load(address, offset, SHORTS), INTS)
        return self.builder.bitcast(self.builder.shl(bits, self.constant(16)), FLOATS)

    def bits(self, x: Any, shift: int, mask: int) -> Any:
        """Bits of each byte, shifted left or, for a negative count, right; the mask keeps
        neighbours out."""
        if shift > 0:
            x = self.builder.shl(x, self.constant(shift))
        elif shift < 0:
            x = self.builder.lshr(x, self.constant(-shift))
        return self.builder.and_(x, self.constant(mask * 0x01010101))

    def dots(
        self, total: Any, weights: Sequence[Any], activations: Sequence[Any], most: int
    ) -> Any:
        """total + the dot products of four bytes in each lane, of each pair of vectors: of weights
        0…most, of activations -127…127."""
        # AVX2 adds two products of bytes to 16 bits, which hold two of 127 · 127.
        if "+avx2" not in self.features or "+avx512vnni" in self.features or most > 127:
            for weight, activation in zip(weights, activations, strict=True):
                total = self._dot(total, weight, activation)
            return total
        count = 0x7FFF // (2 * 127 * most)
        for first in range(0, len(weights), count):
            some = slice(first, first + count)
            sums = [
                self._byte_pairs(*pair)
                for pair in zip(weights[some], activations[some], strict=True)
            ]
            total = self.builder.add(total, self._joined(sums))
        return total

    def _byte_pairs(self, weights: Any, activations: Any) -> list[Any]:
        """Sums of two neighbouring products, in 16 bits, of each half of the lanes."""
        halves = [(self._half(weights, half), self._half(activations, half)) for half in range(2)]
        return [self._call_avx2("pmadd.ub.sw", _HALF_PAIRS, *pair) for pair in halves]

    def _joined(self, sums: Sequence[Sequence[Any]]) -> Any:
        """Sums of two neighbouring numbers of 16 bits, added up, in 32 bits."""
        halves = []
        for half in range(2):
            total = sums[0][half]
            for each in sums[1:]:
                total = self.builder.add(total, each[half])
            halves.append(
                self._call_avx2("pmadd.wd", _HALF_INTS, total, self.constant(1, _HALF_PAIRS))
            )
        return self.builder.shuffle_vector(*halves, ir.Constant(INTS, list(range(TILE_ROWS))))

    def _half(self, x: Any, half: int) -> Any:
        """Bytes of half of the lanes."""
        lanes = ir.Constant(ir.VectorType(INT, 8), list(range(8 * half, 8 * half + 8)))
        return self.builder.bitcast(self.builder.shuffle_vector(x, x, lanes), _HALF)

    def _call_avx2(self, name: str, kind: ir.VectorType, x: Any, y: Any) -> Any:
        function = ir.FunctionType(kind, [x.type, y.type])
        return self.builder.call(
            self.builder.module.declare_intrinsic(f"llvm.x86.avx2.{name}", (), function), [x, y]
        )

    def _dot(self, total: Any, weights: Any, activations: Any) -> Any:
        """total + the dot product of four bytes in each lane: of weights 0…255, of activations
        -127…127."""
        if "+avx512vnni" in self.features:
            function = self.builder.module.declare_intrinsic(
                "llvm.x86.avx512.vpdpbusd.512", (), ir.FunctionType(INTS, [INTS, PACKED, PACKED])
            )
            values = [self.builder.bitcast(x, PACKED) for x in (weights, activations)]
            return self.builder.call(function, [total, *values])
        b = self.builder
        eight = self.constant(8, WIDE)
        weights = b.bitcast(weights, WIDE)
        activations = b.bitcast(activations, WIDE)
        even = b.and_(weights, self.constant(255, WIDE)), b.ashr(b.shl(activations, eight), eight)
        odd = b.lshr(weights, eight), b.ashr(activations, eight)
        return b.add(total, b.add(self._pairs(*even), self._pairs(*odd)))

    def _pairs(self, x: Any, y: Any) -> Any:
        """Sums of two neighbouring products of 16-bit numbers."""
        b = self.builder
        wide = ir.VectorType(INT, 32)
        if "+avx2" in self.features:
            # LLVM finds the instruction itself, but not where rows stand apart.
            halves = [
                ir.Constant(ir.VectorType(INT, 16), list(range(16 * i, 16 * i + 16)))
                for i in range(2)
            ]
            sums = [
                self._call_avx2(
                    "pmadd.wd", _HALF_INTS, *(b.shuffle_vector(each, each, half) for each in (x, y))
                )
                for half in halves
            ]
            return b.shuffle_vector(*sums, ir.Constant(INTS, list(range(TILE_ROWS))))
        product = b.mul(b.sext(x, wide), b.sext(y, wide))
        first, second = (
            b.shuffle_vector(product, product, ir.Constant(INTS, list(range(at, 32, 2))))
            for at in (0, 1)
        )
        return b.add(first, second)


@dataclass(frozen=True, slots=True, kw_only=True)
class TileBlock:
    """Values of a block of 32 inputs that all rows share."""

    words: Sequence[Any]
    """Eight vectors, each with four inputs of each of the sixteen outputs."""
    most: int
    """Largest byte that a word may hold."""
    scale: Any
    zero: Any = None
    """int32 number that is subtracted from the words' bytes; None: none is."""
    minimum: Any = None
    """Number that is added to each weight, or subtracted where there is a `min_factor`; None: none
    is."""
    factors: Sequence[Any] = ()
    """int32 factors of both halves in Q6_K, of the block in other nested formats."""
    min_factor: Any = None


def add_block(code: TileCode, total: Any, block: TileBlock, address: Any) -> Any:
    """Adds the product with one row's block to total [16 outputs]."""
    b = code.builder

    def number(offset: int, kind: ir.Type) -> Any:
        return code.broadcast(code.load(address, offset, kind), ir.VectorType(kind, TILE_ROWS))

    def dot(steps: range, start: Any) -> Any:
        words = [block.words[step] for step in steps]
        return code.dots(start, words, [number(4 * step, INT) for step in steps], block.most)

    def start(inputs: Any) -> Any:
        """Initial sum: the part of the zero point in the product with inputs of this sum."""
        return (
            code.constant(0)
            if block.zero is None
            else b.sub(code.constant(0), b.mul(inputs, block.zero))
        )

    scale = b.fmul(block.scale, number(SCALE_AT, FLOAT))
    if len(block.factors) == 2:
        half = b.ashr(number(HALF_SUM_AT, INT), code.constant(1))
        whole = number(SUM_AT, INT)
        starts = start(half), start(b.sub(whole, half))
        parts = [dot(range(4 * i, 4 * i + 4), first) for i, first in enumerate(starts)]
        result = b.add(
            *(b.mul(part, factor) for part, factor in zip(parts, block.factors, strict=True))
        )
        return b.fadd(total, b.fmul(b.sitofp(result, FLOATS), scale))
    result = dot(range(8), start(number(SUM_AT, INT)))
    if block.factors:
        result = b.mul(result, block.factors[0])
    product = b.fmul(b.sitofp(result, FLOATS), scale)
    if block.min_factor is not None:
        minimum = b.sitofp(b.mul(number(SUM_AT, INT), block.min_factor), FLOATS)
        minimum = b.fmul(minimum, b.fmul(block.minimum, number(SCALE_AT, FLOAT)))
        return b.fadd(total, b.fsub(product, minimum))
    if block.minimum is not None:
        product = b.fadd(product, b.fmul(block.minimum, number(SCALED_SUM_AT, FLOAT)))
    return b.fadd(total, product)


def add_blocks(
    code: TileCode,
    totals: Sequence[Any],
    block: TileBlock,
    address: Any,
    row_bytes: Any,
    rests: Any,
) -> None:
    """Adds the product with the block of each row, and with its rest, to the sixteen outputs that
    `totals` points to.

    `address`: of the first row's block; `row_bytes`: distance between rows; `rests`: distance from
    a block to its rest, None where rows have none.
    """
    b = code.builder
    for total in totals:
        b.store(add_block(code, b.load(total), block, address), total)
        if rests is not None:
            with b.if_then(has_rest(code, [address]), likely=False):
                b.store(add_block(code, b.load(total), block, b.add(address, rests)), total)
        address = b.add(address, row_bytes)


def has_rest(code: TileCode, addresses: Sequence[Any]) -> Any:
    """Whether one of the blocks of activations at these addresses has a rest."""
    number = code.load(addresses[0], HALF_SUM_AT, INT)
    for address in addresses[1:]:
        number = code.builder.or_(number, code.load(address, HALF_SUM_AT, INT))
    return code.builder.trunc(number, ir.IntType(1))


def store_outputs(code: TileCode, total: Any, address: Any, num_outputs: Any, element: Any) -> None:
    """Stores the first `num_outputs` of sixteen numbers, all if it is greater."""
    b = code.builder
    kind = FLOATS if element == F32 else SHORTS
    value = total if element == F32 else rounded(b, total, (INTS, SHORTS))
    size = 4 if element == F32 else 2
    with b.if_else(b.icmp_signed(">=", num_outputs, ir.Constant(LONG, TILE_ROWS))) as (whole, part):
        with whole:
            b.store(value, b.inttoptr(address, kind.as_pointer()), align=size)
        with part:
            for lane in range(TILE_ROWS - 1):
                with b.if_then(b.icmp_signed("<", ir.Constant(LONG, lane), num_outputs)):
                    at = b.add(address, ir.Constant(LONG, lane * size))
                    one = b.extract_element(value, ir.Constant(INT, lane))
                    b.store(one, b.inttoptr(at, kind.element.as_pointer()))
