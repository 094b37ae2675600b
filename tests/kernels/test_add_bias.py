from __future__ import annotations

import pytest
import torch

from headwater.kernels.gemm.add_bias import add_bias
from headwater.kernels.gemm.gemm import linear


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(1, 17), (3, 2880)], ids=str)
def test_a_bias_is_added_as_plain_torch_adds_it(
    shape: tuple[int, int], dtype: torch.dtype, generator: torch.Generator
) -> None:
    x, bias = (
        torch.randn(size, generator=generator, device=generator.device).to(dtype)
        for size in (shape, shape[1:])
    )
    expected = x + bias
    add_bias(x, bias)
    assert torch.equal(x, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_gelu_follows_the_sum_before_it_is_rounded(
    dtype: torch.dtype, generator: torch.Generator
) -> None:
    x, bias = (
        torch.randn(size, generator=generator, device=generator.device).to(dtype)
        for size in ((3, 96), (96,))
    )
    expected = torch.nn.functional.gelu(x.double() + bias.double())
    add_bias(x, bias, has_gelu=True)
    tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-6
    torch.testing.assert_close(x.double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(("m", "n", "k"), [(1, 96, 256), (3, 70, 192), (3, 2112, 64)])
def test_a_product_adds_its_bias_as_a_launch_of_its_own(
    m: int, n: int, k: int, generator: torch.Generator
) -> None:
    x, weight, biases = (
        torch.randn(size, k, generator=generator, device=generator.device).bfloat16()
        for size in (m, n, n)
    )
    bias = biases[:, 0].contiguous()
    expected = linear(x, weight)
    add_bias(expected, bias)
    assert torch.equal(linear(x, weight, bias=bias), expected)
