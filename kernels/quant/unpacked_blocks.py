"""Weights in GGUF's block formats as numbers in registers, in the places from which Hopper's matrix
unit takes them.

As `unpacked_weights`, with the bits of `block_planes.expand`: a number times its scale is exact in
float32, and a sum with a minimum is rounded to it before it is rounded to bfloat16.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .unpacked_weights import of_eight_words

DIVISOR_BITS = 32
DIVISOR = gl.constexpr(2.0**DIVISOR_BITS)
"""Divisor of the weights of `unpack_nibbles`, so that scales times the powers of places are
finite."""


@gluon.constexpr_function
def bit_layout():
    """Layout of the elements of a tile of `BlockPlanes.high`, [256]: a thread has those of its
    words."""
    return gl.DistributedLinearLayout(
        reg_bases=[[32]],
        lane_bases=[[1], [2], [4], [8], [16]],
        warp_bases=[[64], [128]],
        block_bases=[],
        shape=[256],
    )


@gluon.jit
def block_scales(group, IS_NESTED: gl.constexpr, MIN_SIGN: gl.constexpr):
    """Scales of the first and of the last 16 inputs of a block of 32, and what is added to its
    weights, float32 [N, 1] each. `group`: scale, minimum and both factors as they are stored."""
    b_scale, b_minimum, b_factor, b_other = group
    b_first = b_scale.to(gl.float32)
    b_last = b_first
    b_added = b_minimum.to(gl.float32) * MIN_SIGN
    if IS_NESTED:
        b_one = b_factor.to(gl.float32)
        b_two = b_other.to(gl.float32)
        b_last = b_first * (b_two if MIN_SIGN == 0 else b_one)
        b_first = b_first * b_one
        b_added = b_added * b_two
    return b_first, b_last, b_added


@gluon.jit
def unpack_nibbles(b_words, group, IS_NESTED: gl.constexpr, MIN_SIGN: gl.constexpr):
    """Converts a block of words, int32 [N, 4], of a format of four bits with minima to bfloat16
    weights of 32 inputs, [N, 32], divided by `DIVISOR`.

    A nibble that is cut out of a word is a subnormal float32 as it stands, q * 2**(place - 149).
    The scale is multiplied by the power that this lacks, once for each place.
    """
    b_scale, _, b_added = block_scales(group, IS_NESTED, MIN_SIGN)
    return of_eight_words(_NIBBLES, (b_words, b_scale, b_added / DIVISOR), False)


@gluon.jit
def unpack_block(
    b_words, b_high, b_upper, group,
    BLOCK: gl.constexpr, BITS: gl.constexpr, OFFSET: gl.constexpr, IS_NESTED: gl.constexpr,
    MIN_SIGN: gl.constexpr,
):  # fmt: skip
    """Converts words int32 [N, 4] of block BLOCK of a tile, and the elements of its fifth and sixth
    bits, to bfloat16 weights of 32 inputs, [N, 32]."""
    b_first, b_last, b_added = block_scales(group, IS_NESTED, MIN_SIGN)
    return of_eight_words(
        assembly(BLOCK, BITS, OFFSET, MIN_SIGN),
        (b_words, b_high, b_upper, b_first, b_last, b_added),
        False,
    )


@gluon.constexpr_function
def assembly(block, bits, offset, min_sign):
    """Unpacks two words, $8 and $9, with elements of their fifth and sixth bits, $10 to $13, scales
    of the first and of the last 16 inputs, $14 to $17, and what is added, $18 and $19, into pairs
    of weights, $0 to $7. A nibble becomes the last bits of 128 + q, to which those above it are
    added."""
    bias = 0x4300 + offset
    lines = [
        "{",
        ".reg .b32 value, bits, base;",
        ".reg .f32 left, right;",
        f"mov.b32 base, {bias << 16 | bias:#x};",
    ]
    for word in (0, 1):
        for pair in range(4):
            lines.append(f"shr.u32 value, ${8 + word}, {4 * pair};")
            lines.append("lop3.b32 value, value, 0x000F000F, 0x43004300, 0xEA;")
            for plane in range(bits - 4):
                places = 4 * block + pair - 4 - plane
                move = "shr.u32" if places >= 0 else "shl.b32"
                lines.append(f"{move} bits, ${10 + 2 * plane + word}, {abs(places)};")
                lines.append(f"lop3.b32 value, bits, {0x100010 << plane:#x}, value, 0xEA;")
            lines.append("sub.rn.bf16x2 value, value, base;")
            lines += ["shl.b32 bits, value, 16;", "mov.b32 left, bits;"]
            lines += ["and.b32 bits, value, 0xFFFF0000;", "mov.b32 right, bits;"]
            scale = f"${14 + word + 2 * (pair // 2)}"
            for number in ("left", "right"):
                if min_sign:
                    lines.append(f"fma.rn.f32 {number}, {number}, {scale}, ${18 + word};")
                else:
                    lines.append(f"mul.rn.f32 {number}, {number}, {scale};")
            lines.append(f"cvt.rn.bf16x2.f32 ${4 * word + pair}, right, left;")
    return "\n".join([*lines, "}"])


def _nibbles_assembly() -> str:
    """Unpacks two words, $8 and $9, with scales, $10 and $11, and what is added, $12 and $13, into
    pairs of weights, $0 to $7."""
    lines = ["{", ".reg .b32 value, half;", ".reg .f32 left, right, scale;"]
    for word in (0, 1):
        lines.append(f"shr.u32 half, ${8 + word}, 16;")
        for pair in range(4):
            power = 149 - DIVISOR_BITS - 4 * pair
            lines.append(f"mul.rn.f32 scale, ${10 + word}, 0f{127 + power << 23:08X};")
            for source, number in ((f"${8 + word}", "left"), ("half", "right")):
                lines.append(f"and.b32 value, {source}, {0xF << 4 * pair:#x};")
                lines.append(f"mov.b32 {number}, value;")
                lines.append(f"fma.rn.f32 {number}, {number}, scale, ${12 + word};")
            lines.append(f"cvt.rn.bf16x2.f32 ${4 * word + pair}, right, left;")
    return "\n".join([*lines, "}"])


_NIBBLES = gl.constexpr(_nibbles_assembly())
