"""Mamba-2 layers on a CPU: against token by token in float64, and the bits of passes of any
sizes."""

from __future__ import annotations

import pytest
import torch

from headwater.kernels.cpu.states.mamba import mamba
from headwater.kernels.mamba.mamba_layer import MambaLayer
from headwater.kernels.mamba.mamba_twin import mamba_twin
from headwater.kernels.mamba.mamba_unit import MambaUnit
from tests.kernels.state_steps import BORDERS, LENGTH, in_steps
from tests.long_values import long_but

BLOCK = 16

DTYPES = long_but((torch.float32, torch.bfloat16), torch.bfloat16)


def random_layer(dtype: torch.dtype, num_units: int = 3) -> MambaLayer:
    unit = MambaUnit(
        num_heads=2,
        head_dim=32,
        state_dim=16,
        width=4,
        block_size=BLOCK,
        element_size=dtype.itemsize,
    )
    heads = num_units * unit.num_heads
    channels = heads * unit.head_dim + 2 * unit.state_dim
    return MambaLayer(
        unit=unit,
        taps=torch.randn(unit.width, channels) / 2,
        bias=torch.randn(channels),
        rates=torch.randn(heads).exp() / 4,
        step_biases=torch.randn(heads) - 1,
        skips=torch.randn(heads),
    )


def random_inputs(layer: MambaLayer, length: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(
        length, 2 * layer.values_size + 2 * layer.unit.state_dim + layer.num_heads
    ).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_prompt_matches_the_twin(dtype: torch.dtype) -> None:
    close = 1e-4 if dtype == torch.float32 else 2e-2
    layer = random_layer(dtype)
    parts = random_inputs(layer, LENGTH, dtype)

    out = in_steps(mamba, layer, [parts], [LENGTH], layer.unit.num_bytes)

    expected = mamba_twin(parts, layer)
    torch.testing.assert_close(out.double(), expected, rtol=close, atol=close)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("borders", BORDERS, ids=lambda borders: f"{borders[0]} of {len(borders)}")
def test_passes_of_any_sizes_and_company_give_the_bits_of_one(
    borders: list[int], dtype: torch.dtype
) -> None:
    layer = random_layer(dtype)
    inputs = [random_inputs(layer, length, dtype) for length in (LENGTH, 20, 33)]
    size = layer.unit.num_bytes

    out = in_steps(mamba, layer, inputs, borders, size)

    alone = [in_steps(mamba, layer, [each], [len(each)], size) for each in inputs]
    assert torch.equal(out, torch.cat(alone))
