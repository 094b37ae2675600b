"""The assembly that unpacks GGUF's block formats on Hopper, executed here: no GPU is needed."""

from __future__ import annotations

import re
from collections.abc import Mapping

import pytest
import torch

from headwater.kernels.gemm.block_unpacking import constants
from headwater.kernels.quant.block_formats import (
    Q4_1,
    Q4_K,
    Q5_0,
    Q5_1,
    Q5_K,
    Q6_K,
    BlockFormat,
    pack,
)
from headwater.kernels.quant.block_planes import BlockPlanes, expand, planes_of
from headwater.kernels.quant.unpacked_blocks import assembly
from tests.kernels.random_blocks import random_rows

N = 64
K = 256
OPERATION = re.compile(r"([a-z0-9.]+) (.*);")


def as_float(bits: torch.Tensor) -> torch.Tensor:
    return bits.to(torch.int32).view(torch.float32)


def as_bits(numbers: torch.Tensor) -> torch.Tensor:
    """int64 of 32 bits, or of 16."""
    if numbers.dtype == torch.float32:
        return numbers.view(torch.int32).long() & 0xFFFFFFFF
    return numbers.view(torch.int16).long() & 0xFFFF


def bfloats(bits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return tuple(
        (bits >> at & 0xFFFF).to(torch.int32).to(torch.int16).view(torch.bfloat16) for at in (0, 16)
    )  # type: ignore[return-value]


def difference(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    low, high = (a - b for a, b in zip(bfloats(first), bfloats(second), strict=True))
    return as_bits(low) | as_bits(high) << 16


def multiplied(
    first: torch.Tensor, second: torch.Tensor, third: torch.Tensor | None = None
) -> torch.Tensor:
    """Rounded once: float64 holds the exact result."""
    product = as_float(first).double() * as_float(second).double()
    return as_bits((product if third is None else product + as_float(third).double()).float())


OPERATIONS = {
    "mov.b32": lambda a: a,
    "shr.u32": lambda a, count: a >> count,
    "shl.b32": lambda a, count: a << count & 0xFFFFFFFF,
    "and.b32": lambda a, b: a & b,
    # Of the one table that is used.
    "lop3.b32": lambda a, b, c, table: {0xEA: a & b | c}[int(table)],
    "sub.rn.bf16x2": difference,
    "mul.rn.f32": multiplied,
    "fma.rn.f32": multiplied,
    "cvt.rn.bf16x2.f32": lambda a, b: (
        as_bits(as_float(a).bfloat16()) << 16 | as_bits(as_float(b).bfloat16())
    ),
}
"""Results of operations on words of 32 bits, as the PTX manual says them."""


def run(text: str, given: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    registers = dict(given)

    def value(operand: str) -> torch.Tensor:
        return registers[operand] if operand in registers else torch.tensor([int(operand, 0)])

    for line in text.splitlines():
        if line in ("{", "}") or line.startswith(".reg"):
            continue
        match = OPERATION.fullmatch(line)
        assert match is not None, line
        target, *operands = match[2].split(", ")
        registers[target] = OPERATIONS[match[1]](*(value(each) for each in operands))
    return registers


def operands(planes: BlockPlanes, block: int) -> dict[str, torch.Tensor]:
    """What threads have for the words c of a block, [32 outputs, 4] each: for outputs of two
    halves, one behind the other as the two that a thread has."""
    tile = block // 4
    in_tile = block % 4
    format = planes.format
    words = planes.words.view(N, -1, 4, 4)[:, tile, :, in_tile].long() & 0xFFFFFFFF
    bits = [torch.zeros_like(words)] * 2
    for i, plane in enumerate(() if planes.high is None else planes.high):
        bits[i] = plane[0, tile].long() & 0xFFFFFFFF
    unit = block * 32 // format.unit
    is_nested = planes.factors is not None
    scale, minimum = (planes.scales[0, unit, each].float() for each in (0, -1))
    factors = planes.factors[0, block].float() if planes.factors is not None else torch.ones(2, N)
    sign = constants(format)["MIN_SIGN"]
    first = scale * factors[0]
    last = scale * factors[0 if sign else 1]
    added = sign * minimum * factors[1] if is_nested else sign * minimum
    of_rows = [as_bits(each)[:, None].expand(N, 4) for each in (first, last, added)]
    found = {}
    for at, each in zip((8, 10, 12, 14, 16, 18), (words, *bits, *of_rows), strict=True):
        found[f"${at}"] = each[: N // 2]
        found[f"${at + 1}"] = each[N // 2 :]
    return found


@pytest.mark.parametrize(
    "format", [Q4_1, Q4_K, Q5_0, Q5_1, Q5_K, Q6_K], ids=lambda format: format.name
)
def test_the_assembly_makes_the_bits_of_the_specification(format: BlockFormat) -> None:
    planes = planes_of(pack(random_rows(format, N, K), format))
    expected = expand(planes, torch.bfloat16)
    facts = constants(format)
    for block in range(K // 32):
        text = assembly(block % 4, format.bits, facts["OFFSET"], facts["MIN_SIGN"])
        made = run(text, operands(planes, block))
        for word in (0, 1):
            # Input 8 p + 2 c + e of a block.
            pairs = torch.stack(
                [torch.stack(bfloats(made[f"${4 * word + pair}"]), 2) for pair in range(4)], 1
            )
            rows = expected[word * N // 2 : (word + 1) * N // 2, 32 * block : 32 * block + 32]
            assert torch.equal(pairs.flatten(1), rows), (block, word)


def test_numbers_of_other_bits_show() -> None:
    planes = planes_of(pack(random_rows(Q6_K, N, K), Q6_K))
    facts = constants(Q6_K)
    made = run(assembly(1, 6, facts["OFFSET"], facts["MIN_SIGN"]), operands(planes, 0))
    first = bfloats(made["$0"])[0]
    assert not torch.equal(first, expand(planes, torch.bfloat16)[: N // 2, 0:8:2])
