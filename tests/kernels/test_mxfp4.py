from __future__ import annotations

import pytest
import torch

from headwater.kernels.gemm import expanded_mxfp4
from headwater.kernels.quant import mxfp4
from headwater.kernels.quant.mxfp4 import Mxfp4Weight
from tests.kernels.paging import GPU


def random_pairs(n: int, k: int) -> torch.Tensor:
    return torch.randint(0, 256, (n, k // 2), dtype=torch.uint8)


def random_weight(n: int, k: int, *, least: int = 0) -> Mxfp4Weight:
    scales = torch.randint(least, mxfp4.MOST_SCALE + 1, (k // mxfp4.BLOCK, n), dtype=torch.uint8)
    return Mxfp4Weight(words=mxfp4.pack(random_pairs(n, k)), scales=scales)


@pytest.mark.parametrize("k", [32, 96, 128, 160, 2880])
def test_numbers_come_out_of_words_as_they_went_in(k: int) -> None:
    pairs = random_pairs(3, k)
    words = mxfp4.pack(pairs)
    assert words.shape == (3, mxfp4.num_words(k))
    numbers = mxfp4.unpack(words, k)
    assert torch.equal(numbers[:, 0::2], pairs & 15)
    assert torch.equal(numbers[:, 1::2], pairs >> 4)


def test_a_weight_is_its_number_times_its_power_of_two() -> None:
    words = mxfp4.pack(torch.arange(16, dtype=torch.uint8)[None])
    quarters = Mxfp4Weight(words=words, scales=torch.tensor([[125]], dtype=torch.uint8))
    values = mxfp4.expand(quarters, torch.bfloat16)[0, 0::2].tolist()
    expected = [0.0, 0.125, 0.25, 0.375, 0.5, 0.75, 1.0, 1.5]
    assert values == expected + [-value for value in expected]


@pytest.mark.parametrize(("first", "stop"), [(0, 128), (128, 256), (32, 96), (128, 288), (96, 288)])
def test_inputs_are_cut_out_of_words(first: int, stop: int) -> None:
    pairs = random_pairs(4, 288)
    cut = mxfp4.cut_inputs(mxfp4.pack(pairs), range(first, stop), 288)
    assert torch.equal(cut, mxfp4.pack(pairs[:, first // 2 : stop // 2].contiguous()))


@pytest.mark.parametrize(
    ("n", "k"),
    [(5, 32), (70, 160), pytest.param(5760, 2880, marks=GPU), pytest.param(130, 4096, marks=GPU)],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_launch_expands_a_weight_to_the_bits_of_its_specification(
    n: int, k: int, dtype: torch.dtype, generator: torch.Generator
) -> None:
    weight = random_weight(n, k, least=2)
    expected = mxfp4.expand(weight, dtype)
    on_device = Mxfp4Weight(
        words=weight.words.to(generator.device), scales=weight.scales.to(generator.device)
    )
    assert torch.equal(expanded_mxfp4.expanded(on_device, dtype).cpu(), expected)
    assert torch.equal(mxfp4.expand(on_device, dtype).cpu(), expected)
