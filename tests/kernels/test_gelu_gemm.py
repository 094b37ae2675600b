from __future__ import annotations

import pytest
import torch

from headwater.kernels.attention.hopper_attention import is_hopper
from headwater.kernels.gemm.add_bias import add_bias
from headwater.kernels.gemm.gelu_gemm import MIN_ROWS, gelu_gemm, gelu_linear
from headwater.kernels.gemm.wide_gemm import wide_gemm
from tests.kernels.paging import GPU


def inputs(
    generator: torch.Generator, m: int, n: int, k: int, dtype: torch.dtype = torch.bfloat16
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x, weight, bias = (
        torch.randn(shape, generator=generator, device=generator.device).to(dtype)
        for shape in ((m, k), (n, k), (n,))
    )
    return x, weight * k**-0.5, bias


def test_gelu_follows_the_product_and_its_bias(generator: torch.Generator) -> None:
    x, weight, bias = inputs(generator, 5, 96, 64, torch.float32)
    found = gelu_linear(x, weight, bias)
    expected = torch.nn.functional.gelu(x.double() @ weight.double().T + bias.double())
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)


@GPU
@pytest.mark.parametrize(
    ("m", "n", "k"), [(MIN_ROWS, 4096, 1024), (2500, 1536, 384), (3001, 3072, 768)]
)
def test_one_launch_has_the_bits_of_two(
    m: int, n: int, k: int, generator: torch.Generator, device: torch.device
) -> None:
    if not is_hopper(device):
        pytest.skip("one launch is for Hopper")
    x, weight, bias = inputs(generator, m, n, k)
    expected = x.new_empty(m, n)
    wide_gemm(x, weight, expected)
    add_bias(expected, bias, has_gelu=True)
    found = x.new_empty(m, n)
    gelu_gemm(x, weight, bias, found)
    assert torch.equal(found, expected)
    few = gelu_linear(x[:7].contiguous(), weight, bias)
    assert torch.equal(few, found[:7])
