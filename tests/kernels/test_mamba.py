"""Mamba-2 layers on a CPU and on a GPU: against token by token in float64, and the bits of passes
of any sizes."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from headwater.kernels.cpu.states.mamba import mamba
from headwater.kernels.mamba import mamba as gpu
from headwater.kernels.mamba.mamba_layer import MambaLayer
from headwater.kernels.mamba.mamba_twin import mamba_twin
from headwater.kernels.mamba.mamba_unit import MambaUnit
from tests.kernels.paging import interpreted
from tests.kernels.state_steps import (
    BLOCK,
    BORDERS,
    LENGTH,
    check_neighbours,
    check_padding,
    fill_with_nan,
    in_steps,
)
from tests.long_values import long_but

DTYPES = long_but((torch.float32, torch.bfloat16), torch.bfloat16)
GROUPS = pytest.mark.parametrize("num_groups", [1, 2])
CHUNKED = [[*range(7, LENGTH, 7), LENGTH], [1, 16, 33, 34, LENGTH]]
"""Ends of passes of an interpreted kernel."""


def random_layer(
    dtype: torch.dtype,
    num_groups: int = 1,
    *,
    num_units: int = 4,
    is_wide: bool = True,
    has_small_pages: bool = False,
    device: torch.device | str = "cpu",
    **sizes: int,
) -> MambaLayer:
    given = {"num_heads": 2, "head_dim": 32, "state_dim": 16, "width": 4, "block_size": BLOCK}
    unit = MambaUnit(
        **given | sizes,
        element_size=dtype.itemsize,
        is_wide=is_wide,
        has_small_pages=has_small_pages,
    )
    heads = num_units * unit.num_heads
    channels = heads * unit.head_dim + 2 * num_groups * unit.state_dim
    weights = {
        "taps": torch.randn(unit.width, channels) / 2,
        "bias": torch.randn(channels),
        "rates": torch.randn(heads).exp() / 4,
        "step_biases": torch.randn(heads) - 1,
        "skips": torch.randn(heads),
    }
    on_device = {name: each.to(device) for name, each in weights.items()}
    return MambaLayer(unit=unit, num_groups=num_groups, **on_device)


def random_inputs(layer: MambaLayer, length: int, dtype: torch.dtype) -> torch.Tensor:
    size = 2 * layer.values_size + 2 * layer.keys_size + layer.num_heads
    return torch.randn(length, size).to(layer.taps.device, dtype)


@GROUPS
@pytest.mark.parametrize("head_dim", [32, 80, 128], ids=["a piece a head", "an odd one", "two"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_prompt_matches_the_twin(dtype: torch.dtype, head_dim: int, num_groups: int) -> None:
    close = 1e-4 if dtype == torch.float32 else 2e-2
    layer = random_layer(dtype, num_groups, head_dim=head_dim)
    parts = random_inputs(layer, LENGTH, dtype)

    out = in_steps(mamba, layer, [parts], [LENGTH], layer.unit.tail_bytes)

    expected = mamba_twin(parts, layer)
    torch.testing.assert_close(out.double(), expected, rtol=close, atol=close)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("borders", BORDERS, ids=lambda borders: f"{borders[0]} of {len(borders)}")
def test_passes_of_any_sizes_and_company_give_the_bits_of_one(
    borders: list[int], dtype: torch.dtype
) -> None:
    layer = random_layer(dtype)
    inputs = [random_inputs(layer, length, dtype) for length in (LENGTH, 20, 33)]
    size = layer.unit.tail_bytes

    out = in_steps(mamba, layer, inputs, borders, size)

    alone = [in_steps(mamba, layer, [each], [len(each)], size) for each in inputs]
    assert torch.equal(out, torch.cat(alone))


@pytest.mark.parametrize("num_groups", interpreted([1, 2], 2))
@pytest.mark.parametrize(
    ("dtype", "close"), [(torch.float32, 1e-4), (torch.bfloat16, 2e-2)], ids=["float32", "bf16"]
)
def test_a_prompt_on_a_gpu_matches_the_twin(
    device: torch.device, dtype: torch.dtype, close: float, num_groups: int
) -> None:
    # Small pages have several pieces for a program's columns.
    has_small_pages = num_groups == 2
    layer = random_layer(
        dtype,
        num_groups,
        num_units=2,
        is_wide=False,
        has_small_pages=has_small_pages,
        device=device,
    )
    parts = random_inputs(layer, LENGTH, dtype)

    out = in_steps(gpu.mamba, layer, [parts], [LENGTH], layer.unit.tail_bytes)

    expected = mamba_twin(parts, layer)
    assert (out.double() - expected).norm() < close * expected.norm()


@pytest.mark.parametrize("has_small_pages", [False, True], ids=["whole", "small pages"])
@pytest.mark.parametrize("head_dim", interpreted([80, 128], 80))
@pytest.mark.parametrize("borders", interpreted(CHUNKED, CHUNKED[1]), ids=["sevens", "at borders"])
def test_passes_and_company_on_a_gpu_give_the_bits_of_one(
    device: torch.device, borders: list[int], head_dim: int, has_small_pages: bool
) -> None:
    # A piece of 80 columns, or two of a head, one of them in a page of its own; or ten or sixteen.
    sizes = {"num_units": 1, "num_heads": 1, "head_dim": head_dim}
    layer = random_layer(
        torch.bfloat16, is_wide=False, has_small_pages=has_small_pages, device=device, **sizes
    )
    inputs = [random_inputs(layer, length, torch.bfloat16) for length in (LENGTH, 20)]
    size = layer.unit.tail_bytes

    out = in_steps(gpu.mamba, layer, inputs, borders, size)

    alone = [in_steps(gpu.mamba, layer, [each], [len(each)], size) for each in inputs]
    assert torch.equal(out, torch.cat(alone))


@pytest.mark.parametrize("start", interpreted([14, 16, 30], 14))
def test_rows_of_one_token_on_a_gpu_may_follow_one_another(
    device: torch.device, start: int
) -> None:
    layer = random_layer(torch.bfloat16, num_units=1, is_wide=False, device=device)
    inputs = random_inputs(layer, 37, torch.bfloat16)
    following = partial(gpu.mamba, are_neighbours=True)
    check_neighbours(gpu.mamba, following, layer, inputs, layer.unit.tail_bytes, start)


def test_padding_on_a_gpu_comes_out_as_zeros(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = random_layer(torch.bfloat16, num_units=1, is_wide=False, device=device)
    inputs = random_inputs(layer, 20, torch.bfloat16)
    fill_with_nan(monkeypatch)
    check_padding(gpu.mamba, layer, inputs, layer.unit.tail_bytes)
