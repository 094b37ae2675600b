"""Short convolutions: against the twin in float64, and the bits of passes of any sizes."""

from __future__ import annotations

import pytest
import torch

from headwater.kernels.conv.conv_layer import ConvLayer, ConvUnit
from headwater.kernels.conv.conv_twin import short_conv_twin
from headwater.kernels.cpu.states.short_conv import short_conv
from headwater.kernels.delta.delta_arguments import StateMemory
from tests.kernels.state_steps import BLOCK, BORDERS, LENGTH, in_steps


def layer_of(width: int, num_units: int = 3, num_channels: int = 32) -> ConvLayer:
    return ConvLayer(
        unit=ConvUnit(num_channels=num_channels, width=width, block_size=BLOCK),
        taps=torch.randn(width, num_units * num_channels),
    )


def size_of(layer: ConvLayer, dtype: torch.dtype) -> int:
    """Bytes of a unit."""
    return (layer.unit.num_before + BLOCK) * layer.unit.num_channels * dtype.itemsize


@pytest.mark.parametrize("width", [3, 4])
@pytest.mark.parametrize(
    ("dtype", "close"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)], ids=["float32", "bf16"]
)
def test_a_prompt_matches_the_twin(dtype: torch.dtype, close: float, width: int) -> None:
    layer = layer_of(width)
    parts = torch.randn(LENGTH, 3 * layer.taps.shape[1]).to(dtype)

    out = in_steps(short_conv, layer, [parts], [LENGTH], size_of(layer, dtype))

    expected = short_conv_twin(parts, layer)
    torch.testing.assert_close(out.double(), expected, rtol=close, atol=close)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bf16"])
@pytest.mark.parametrize("borders", BORDERS, ids=lambda borders: f"{borders[0]} of {len(borders)}")
def test_passes_of_any_sizes_and_company_give_the_bits_of_one(
    borders: list[int], dtype: torch.dtype
) -> None:
    layer = layer_of(3)
    inputs = [torch.randn(n, 3 * layer.taps.shape[1]).to(dtype) for n in (LENGTH, 20, 33)]

    out = in_steps(short_conv, layer, inputs, borders, size_of(layer, dtype))

    size = size_of(layer, dtype)
    alone = [in_steps(short_conv, layer, [each], [len(each)], size) for each in inputs]
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

    expected = in_steps(short_conv, layer, [right], [LENGTH], unit_bytes)
    assert torch.equal(torch.cat((again, behind)), expected[20:])
