"""Short convolutions on a CPU and on a GPU: against the twin in float64, and the bits of passes of
any sizes."""

from __future__ import annotations

from copy import copy
from functools import partial

import pytest
import torch

from headwater.kernels.conv import short_conv as gpu
from headwater.kernels.conv.conv_layer import ConvLayer, ConvUnit
from headwater.kernels.conv.conv_twin import short_conv_twin
from headwater.kernels.cpu.states.short_conv import short_conv
from tests.kernels.paging import interpreted
from tests.kernels.state_steps import (
    BLOCK,
    BORDERS,
    LENGTH,
    StatePages,
    check_neighbours,
    check_padding,
    fill_with_nan,
    in_steps,
)


def layer_of(
    width: int,
    num_units: int = 3,
    num_channels: int = 32,
    device: torch.device | str = "cpu",
) -> ConvLayer:
    return ConvLayer(
        unit=ConvUnit(num_channels=num_channels, width=width, block_size=BLOCK),
        taps=torch.randn(width, num_units * num_channels).to(device),
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
    unit_bytes = size_of(layer, torch.float32)
    pages = StatePages(short_conv, layer, [right], unit_bytes)
    # The same pages, of other inputs.
    drafted = copy(pages)
    drafted.inputs = [wrong]

    pages.run([(0, 0, 20)])
    drafted.run([(0, 20, 34)])
    again = pages.run([(0, 20, 34)])
    behind = pages.run([(0, 34, LENGTH)])

    expected = in_steps(short_conv, layer, [right], [LENGTH], unit_bytes)
    assert torch.equal(torch.cat((again, behind)), expected[20:])


@pytest.mark.parametrize("width", [3, 4])
@pytest.mark.parametrize(
    ("dtype", "close"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)], ids=["float32", "bf16"]
)
def test_a_prompt_on_a_gpu_matches_the_twin(
    device: torch.device, dtype: torch.dtype, close: float, width: int
) -> None:
    layer = layer_of(width, device=device)
    parts = torch.randn(LENGTH, 3 * layer.taps.shape[1]).to(device, dtype)

    out = in_steps(gpu.short_conv, layer, [parts], [LENGTH], size_of(layer, dtype))

    expected = short_conv_twin(parts, layer)
    torch.testing.assert_close(out.double(), expected, rtol=close, atol=close)


@pytest.mark.parametrize(
    "borders",
    interpreted(BORDERS, BORDERS[1], BORDERS[-1]),
    ids=lambda borders: f"{borders[0]} of {len(borders)}",
)
def test_passes_and_company_on_a_gpu_give_the_bits_of_one(
    device: torch.device, borders: list[int]
) -> None:
    layer = layer_of(3, num_units=1, device=device)
    inputs = [torch.randn(n, 96).to(device, torch.bfloat16) for n in (LENGTH, 20)]
    size = size_of(layer, torch.bfloat16)

    out = in_steps(gpu.short_conv, layer, inputs, borders, size)

    alone = [in_steps(gpu.short_conv, layer, [each], [len(each)], size) for each in inputs]
    assert torch.equal(out, torch.cat(alone))


@pytest.mark.parametrize("width", [3, 5])
@pytest.mark.parametrize("start", interpreted([13, 14, 16, 30], 14, 16))
def test_rows_of_one_token_on_a_gpu_may_follow_one_another(
    device: torch.device, start: int, width: int
) -> None:
    layer = layer_of(width, num_units=1, device=device)
    inputs = torch.randn(37, 96).to(device, torch.bfloat16)
    size = size_of(layer, torch.bfloat16)
    following = partial(gpu.short_conv, are_neighbours=True)
    check_neighbours(gpu.short_conv, following, layer, inputs, size, start)


def test_padding_on_a_gpu_comes_out_as_zeros(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = layer_of(3, num_units=1, device=device)
    inputs = torch.randn(20, 96).to(device, torch.bfloat16)
    fill_with_nan(monkeypatch)
    check_padding(gpu.short_conv, layer, inputs, size_of(layer, torch.bfloat16))
