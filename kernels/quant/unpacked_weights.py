"""Weights of few bits as numbers in registers, in the places from which Hopper's matrix unit takes
them.

A thread holds a word of four bytes of each of four blocks of a tile, for two outputs that are eight
apart. Of a tile of half as many outputs it holds one of them, and zeros in place of the other. The
words are those of `int4_layout` and `byte_layout`. Every weight is rounded once, as `expand` there
rounds it.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

INT4_DIVISOR = gl.constexpr(256.0)
NIBBLE_POWERS = 0x7E007E00, 0x7C007C00
"""2**125 and 2**121 twice, as bfloat16: a lower and an upper nibble times them is q / 256."""
SCALE_POWERS = *NIBBLE_POWERS, 0xBD00BD00
"""Factors of a scale where zero points are 8, the last one -8 / 256."""
MIDDLE_OFFSET = gl.constexpr(0xBD00BD00 - (1 << 32))
"""-8 / 256 twice."""


@gluon.constexpr_function
def word_layout(num_outputs):
    """Layout of the words of a tile, [64, 16] or [32, 16]."""
    of_two = num_outputs == 64
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], *([[8, 0]] if of_two else [])],
        lane_bases=[[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]] if of_two else [[8, 0], [16, 0]],
        block_bases=[],
        shape=[num_outputs, 16],
    )


@gluon.jit
def twice(b_rows):
    """Rows [32, K], eight at a time, and behind them the same ones: [64, K]. Takes no registers."""
    K: gl.constexpr = b_rows.shape[1]
    b_both = gl.reshape(gl.join(b_rows, b_rows), (4, 8, K, 2))
    return gl.reshape(gl.permute(b_both, (0, 3, 1, 2)), (64, K))


@gluon.jit
def split_blocks(b_words):
    """The words of a tile [N, 16] by blocks: four times [N, 4]."""
    # [N, words of a block, block by bit 1, block by bit 0]
    b_even, b_odd = gl.split(gl.reshape(b_words, (b_words.shape[0], 4, 2, 2)))
    b_0, b_2 = gl.split(b_even)
    b_1, b_3 = gl.split(b_odd)
    return b_0, b_1, b_2, b_3


@gluon.jit
def beside(b_left, b_right):
    """Two tensors [N, K] side by side: [N, 2 K]."""
    b_both = gl.permute(gl.join(b_left, b_right), (0, 2, 1))
    return gl.reshape(b_both, (b_left.shape[0], 2 * b_left.shape[1]))


@gluon.jit
def unpack_int4(b_words, group, HAS_ZEROS: gl.constexpr, HALF: gl.constexpr):
    """Converts a block of words, int32 [N, 4], with a group's scales and zero points, [N, 1] each,
    to bfloat16 weights of 32 inputs, [N, 32], divided by `INT4_DIVISOR`. Without zero points they
    are 8.

    A nibble that is cut out of a word is a subnormal bfloat16 as it stands, q * 2**-133 or, of an
    upper one, q * 2**-129; a multiplication makes it a number and subtracts the zero point,
    exactly. A float16 scale is the sum of two bfloat16 numbers; the product with the lower one has
    at most eight bits, so that only the last operation rounds. Scales are below 8. `HALF`: outputs
    whose bit 3 is set get zeros.
    """
    b_scale, b_zero = group
    if b_scale.dtype == gl.bfloat16:
        if not HAS_ZEROS:
            b_lower, b_upper, b_offset = _times_powers(_in_both(b_scale))
            b_weights = of_eight_words(_INT4_ONCE, (b_words, b_lower, b_upper, b_offset), HALF)
        else:
            b_weights = of_eight_words(
                _INT4_BF16, (b_words, _offset(b_zero), _in_both(b_scale)), HALF
            )
    else:
        b_wide = b_scale.to(gl.float32)
        b_high = b_wide.to(gl.bfloat16)
        b_low = (b_wide - b_high.to(gl.float32)).to(gl.bfloat16)
        if not HAS_ZEROS:
            b_offset = gl.full(b_scale.shape, MIDDLE_OFFSET, gl.int32, b_scale.type.layout)
        else:
            b_offset = _offset(b_zero)
        b_weights = of_eight_words(
            _INT4_FP16, (b_words, b_offset, _in_both(b_high), _in_both(b_low)), HALF
        )
    return b_weights


@gluon.jit
def of_eight_words(ASSEMBLY: gl.constexpr, operands, HALF: gl.constexpr):
    """Weights [N, 32] of a block: `ASSEMBLY` makes eight words of pairs of two words of each
    operand."""
    w0, w1, w2, w3, w4, w5, w6, w7 = gl.inline_asm_elementwise(
        ASSEMBLY,
        "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r" + ",r,r" * len(operands),
        operands,
        dtype=[gl.bfloat16] * 8,
        is_pure=True,
        pack=2,
    )
    return beside(in_order(w0, w1, w4, w5, HALF), in_order(w2, w3, w6, w7, HALF))


@gluon.jit
def unpack_int8(b_words, group, HALF: gl.constexpr):
    """Like `unpack_int4`, for integers of eight bits: weights of 16 inputs, [N, 16]. The difference
    is exact in float32, and its product with the scale is rounded to float32 first, as in
    `byte_weights`."""
    b_scale, b_zero = group
    w0, w1, w2, w3 = gl.inline_asm_elementwise(
        _INT8,
        "=&r,=&r,=&r,=&r,r,r,r,r,r,r",
        [b_words, b_scale.to(gl.float32), b_zero.to(gl.float32) + 8388608.0],
        dtype=[gl.bfloat16] * 4,
        is_pure=True,
        pack=2,
    )
    return in_order(w0, w1, w2, w3, HALF)


@gluon.jit
def unpack_fp8(b_words, group, HALF: gl.constexpr):
    """Like `unpack_int8`, for e4m3 numbers, which have no zero point."""
    b_scale, _ = group
    w0, w1, w2, w3 = gl.inline_asm_elementwise(
        _FP8,
        "=&r,=&r,=&r,=&r,r,r,r,r",
        [b_words, b_scale.to(gl.float32)],
        dtype=[gl.bfloat16] * 4,
        is_pure=True,
        pack=2,
    )
    return in_order(w0, w1, w2, w3, HALF)


@gluon.jit
def unpack_float4(b_words, group, HALF: gl.constexpr):
    """Like `unpack_int4`, for words of `mxfp4` with scales in e8m0, [N, 1]; nothing is divided. The
    bits of a number are a bfloat16 number as they stand, 2**126 times too small; the product with a
    scale, at most 2, that is as much larger is exact."""
    b_scale, _ = group
    b_power = ((b_scale.to(gl.int32) + 126) << 7) * 0x10001
    return of_eight_words(_FLOAT4, (b_words, b_power), HALF)


@gluon.jit
def in_order(b_00, b_01, b_10, b_11, HALF: gl.constexpr):
    """Weights [N, 16] of pairs 0 and 1 of outputs whose bit 3 is clear, and of those whose bit 3 is
    set. The assembly puts the two elements of a pair where the two outputs of a thread would be: in
    place of bit 3."""
    N: gl.constexpr = b_00.shape[0]
    if HALF:
        # What the second outputs would be is not computed then: the assembler leaves out what
        # nothing reads.
        b_10 = gl.full(b_10.shape, 0.0, b_10.dtype, b_10.type.layout)
        b_11 = b_10
    b_pairs = gl.join(gl.join(b_00, b_10), gl.join(b_01, b_11))
    # [outputs / 16, element, outputs, words, bit 3 of an output, pair]
    b_pairs = gl.reshape(b_pairs, (N // 16, 2, 8, 4, 2, 2))
    return gl.reshape(gl.permute(b_pairs, (0, 4, 2, 5, 3, 1)), (N, 16))


@gluon.jit
def _in_both(b_values):
    """Both halves of an int32: a bfloat16."""
    return gl.inline_asm_elementwise(
        "mov.b32 $0, {$1, $1};", "=r,h", [b_values], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def _offset(b_zero):
    """Both halves of an int32: minus a zero point, divided by `INT4_DIVISOR`. It becomes the last
    bits of 128 + z."""
    return gl.inline_asm_elementwise(
        _OFFSET,
        "=r,r",
        [b_zero.to(gl.int32) * 0x10001 | 0x43004300],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def _times_powers(b_scale):
    """A scale, in both halves of an int32, times the powers that nibbles want, and times minus
    eight."""
    return gl.inline_asm_elementwise(
        _POWERS, "=&r,=&r,=&r,r", [b_scale], dtype=[gl.int32] * 3, is_pure=True, pack=1
    )


def _int4_assembly(kind: str) -> str:
    """Unpacks two words, $8 and $9, into pairs of weights, $0 to $7.

    "once": $10 to $15 are scales for lower and for upper nibbles and what is added. Else $10 and
    $11 are offsets, $12 and $13 scales, of which "float16" has the lower parts in $14 and $15.
    """
    lines = ["{", ".reg .b32 value, low, shifted, powers<2>;"]
    lines += [f"mov.b32 powers{i}, {power:#x};" for i, power in enumerate(NIBBLE_POWERS)]
    for word in (0, 1):
        lines.append(f"shr.u32 shifted, ${8 + word}, 8;")
        for pair in range(4):
            out = f"${4 * word + pair}"
            is_upper = pair % 2
            source = "shifted" if pair >= 2 else f"${8 + word}"
            lines.append(f"and.b32 value, {source}, {0x00F000F0 if is_upper else 0x000F000F:#x};")
            if kind == "once":
                lines.append(
                    f"fma.rn.bf16x2 {out}, value, ${10 + 2 * is_upper + word}, ${14 + word};"
                )
                continue
            lines.append(f"fma.rn.bf16x2 value, value, powers{is_upper}, ${10 + word};")
            if kind == "float16":
                lines.append(f"mul.rn.bf16x2 low, value, ${14 + word};")
                lines.append(f"fma.rn.bf16x2 {out}, value, ${12 + word}, low;")
            else:
                lines.append(f"mul.rn.bf16x2 {out}, value, ${12 + word};")
    return "\n".join([*lines, "}"])


def _float4_assembly() -> str:
    """Unpacks two words, $8 and $9, with scales, $10 and $11, into pairs of weights, $0 to $7."""
    lines = ["{", ".reg .b32 value, sign, mantissa;"]
    for word in (0, 1):
        source = f"${8 + word}"
        for pair in range(4):
            if pair < 3:
                lines.append(f"shl.b32 value, {source}, {3 * pair};")
                lines.append("and.b32 value, value, 0x81C081C0;")
            else:
                lines.append(f"shl.b32 sign, {source}, 1;")
                lines.append("and.b32 sign, sign, 0x80008000;")
                lines.append(f"shr.u32 value, {source}, 3;")
                lines.append("and.b32 value, value, 0x01800180;")
                lines.append(f"shr.u32 mantissa, {source}, 7;")
                lines.append("and.b32 mantissa, mantissa, 0x00400040;")
                lines.append("or.b32 value, value, sign;")
                lines.append("or.b32 value, value, mantissa;")
            lines.append(f"mul.rn.bf16x2 ${4 * word + pair}, value, ${10 + word};")
    return "\n".join([*lines, "}"])


def _int8_assembly() -> str:
    """Unpacks two words, $4 and $5, with scales, $6 and $7, and offsets, $8 and $9, into pairs of
    weights, $0 to $3. A byte becomes the last bits of 2**23 + q."""
    lines = ["{", ".reg .f32 left, right;", ".reg .b32 bits;"]
    for word in (0, 1):
        for pair in (0, 1):
            for place, number in enumerate(("left", "right")):
                lines.append(
                    f"prmt.b32 bits, ${4 + word}, 0x4B000000, {0x7650 + 2 * pair + place};"
                )
                lines.append(f"mov.b32 {number}, bits;")
                lines.append(f"sub.rn.f32 {number}, {number}, ${8 + word};")
                lines.append(f"mul.rn.f32 {number}, {number}, ${6 + word};")
            lines.append(f"cvt.rn.bf16x2.f32 ${2 * word + pair}, right, left;")
    return "\n".join([*lines, "}"])


def _fp8_assembly() -> str:
    """Unpacks two words, $4 and $5, with scales, $6 and $7, into pairs of weights, $0 to $3."""
    lines = ["{", ".reg .b16 pairs<2>, left, right;", ".reg .b32 both;", ".reg .f32 low, high;"]
    for word in (0, 1):
        lines.append(f"mov.b32 {{pairs0, pairs1}}, ${4 + word};")
        for pair in (0, 1):
            lines.append(f"cvt.rn.f16x2.e4m3x2 both, pairs{pair};")
            lines.append("mov.b32 {left, right}, both;")
            for half, number in (("left", "low"), ("right", "high")):
                lines.append(f"cvt.f32.f16 {number}, {half};")
                lines.append(f"mul.rn.f32 {number}, {number}, ${6 + word};")
            lines.append(f"cvt.rn.bf16x2.f32 ${2 * word + pair}, high, low;")
    return "\n".join([*lines, "}"])


_INT4_ONCE = gl.constexpr(_int4_assembly("once"))
_INT4_BF16 = gl.constexpr(_int4_assembly("bfloat16"))
_INT4_FP16 = gl.constexpr(_int4_assembly("float16"))
_FLOAT4 = gl.constexpr(_float4_assembly())
_OFFSET = gl.constexpr(
    "{ .reg .b32 factor, half; mov.b32 factor, 0xBB80BB80; mov.b32 half, 0x3F003F00;"
    " fma.rn.bf16x2 $0, $1, factor, half; }"
)
_POWERS = gl.constexpr(
    "{ .reg .b32 power; "
    + " ".join(
        f"mov.b32 power, {power:#x}; mul.rn.bf16x2 ${i}, $3, power;"
        for i, power in enumerate(SCALE_POWERS)
    )
    + " }"
)
_INT8 = gl.constexpr(_int8_assembly())
_FP8 = gl.constexpr(_fp8_assembly())
