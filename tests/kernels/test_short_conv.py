"""Short convolutions: against the twin in float64, and the bits of passes of any sizes."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from headwater.kernels.conv.conv_layer import ConvLayer, ConvUnit
from headwater.kernels.conv.conv_twin import short_conv_twin
from headwater.kernels.cpu.short_conv import short_conv
from headwater.kernels.delta.delta_arguments import StateMemory

BLOCK = 16
LENGTH = 50
"""Three borders, and two tokens."""
FIRST_UNIT = 1
UNITS_PER_PAGE = 2


def layer_of(width: int, num_units: int = 3, num_channels: int = 32) -> ConvLayer:
    return ConvLayer(
        unit=ConvUnit(num_channels=num_channels, width=width, block_size=BLOCK),
        taps=torch.randn(width, num_units * num_channels),
    )


def in_steps(layer: ConvLayer, inputs: list[torch.Tensor], borders: list[int]) -> torch.Tensor:
    """Rows' tokens up to each border in one pass; what is left of a shorter row comes in the pass
    that reaches its end. Pages hold garbage before they are written."""
    unit = layer.unit
    unit_bytes = (unit.num_before + BLOCK) * unit.num_channels * inputs[0].element_size()
    num_pages = -(-(FIRST_UNIT + layer.num_units) // UNITS_PER_PAGE)
    num_sets = LENGTH // BLOCK + 1
    pages = torch.full((len(inputs) * num_sets * num_pages, 2 * unit_bytes), 255, dtype=torch.uint8)

    def pages_of(positions: list[int]) -> torch.Tensor:
        sets = [row * num_sets + position // BLOCK for row, position in enumerate(positions)]
        return torch.tensor(
            [[each * num_pages + i for i in range(num_pages)] for each in sets]
        ).int()

    outputs = [torch.empty(0, layer.taps.shape[1], dtype=inputs[0].dtype) for _ in inputs]
    for begin, end in pairwise([0, *borders]):
        starts = [min(begin, len(each)) for each in inputs]
        ends = [min(end, len(each)) for each in inputs]
        lengths = [stop - start for start, stop in zip(starts, ends, strict=True)]
        tokens = [sum(lengths[:row]) for row in range(len(inputs))]
        memory = StateMemory(
            pages=pages,
            first=pages_of(starts),
            last=pages_of(ends),
            starts=torch.tensor(starts).int(),
            ends=torch.tensor(ends).int(),
            tokens=torch.tensor(tokens).int(),
            unit_bytes=unit_bytes,
            units_per_page=UNITS_PER_PAGE,
            first_unit=FIRST_UNIT,
        )
        spans = zip(inputs, starts, ends, strict=True)
        batch = torch.cat([each[start:stop] for each, start, stop in spans])
        made = short_conv(batch, layer, memory).split(lengths)
        outputs = [torch.cat(pair) for pair in zip(outputs, made, strict=True)]
    return torch.cat(outputs)


@pytest.mark.parametrize("width", [3, 4])
@pytest.mark.parametrize(
    ("dtype", "close"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)], ids=["float32", "bf16"]
)
def test_a_prompt_matches_the_twin(dtype: torch.dtype, close: float, width: int) -> None:
    layer = layer_of(width)
    parts = torch.randn(LENGTH, 3 * layer.taps.shape[1]).to(dtype)

    out = in_steps(layer, [parts], [LENGTH])

    expected = short_conv_twin(parts, layer)
    torch.testing.assert_close(out.double(), expected, rtol=close, atol=close)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bf16"])
@pytest.mark.parametrize(
    "borders",
    [
        [*range(1, LENGTH + 1)],
        [1, LENGTH],
        [15, LENGTH],
        [16, LENGTH],
        [17, LENGTH],
        [2, 18, 34, LENGTH],
        [*range(7, LENGTH, 7), LENGTH],
        [32, 33, 48, LENGTH],
    ],
    ids=lambda borders: f"{borders[0]} of {len(borders)}",
)
def test_passes_of_any_sizes_and_company_give_the_bits_of_one(
    borders: list[int], dtype: torch.dtype
) -> None:
    layer = layer_of(3)
    inputs = [torch.randn(n, 3 * layer.taps.shape[1]).to(dtype) for n in (LENGTH, 20, 33)]

    out = in_steps(layer, inputs, borders)

    alone = [in_steps(layer, [each], [len(each)]) for each in inputs]
    assert torch.equal(out, torch.cat(alone))


def test_tokens_that_are_computed_again_take_the_place_of_those_that_were_dropped() -> None:
    layer = layer_of(3, num_units=1)
    right = torch.randn(LENGTH, 3 * layer.taps.shape[1])
    wrong = right.clone()
    wrong[20:] = torch.randn_like(wrong[20:])
    unit_bytes = (2 + BLOCK) * 32 * 4
    pages = torch.zeros(4, unit_bytes, dtype=torch.uint8)

    def run(parts: torch.Tensor, start: int, end: int) -> torch.Tensor:
        memory = StateMemory(
            pages=pages,
            first=torch.tensor([[start // BLOCK]]).int(),
            last=torch.tensor([[end // BLOCK]]).int(),
            starts=torch.tensor([start]).int(),
            ends=torch.tensor([end]).int(),
            tokens=torch.tensor([0]).int(),
            unit_bytes=unit_bytes,
            units_per_page=1,
            first_unit=0,
        )
        return short_conv(parts[start:end], layer, memory)

    run(right, 0, 20)
    run(wrong, 20, 34)
    again = run(right, 20, 34)
    behind = run(right, 34, LENGTH)

    expected = in_steps(layer, [right], [LENGTH])
    assert torch.equal(torch.cat((again, behind)), expected[20:])
