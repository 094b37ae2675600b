from __future__ import annotations

import pytest
import torch

from headwater.kernels.cpu.encoders.add_layer_norm import add_layer_norm as add_layer_norm_on_cpu
from headwater.kernels.norm.add_layer_norm import add_layer_norm, add_layer_norm_twin


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(1, 17), (5, 384), (3, 1024)], ids=str)
def test_the_norm_of_a_sum_takes_the_place_of_the_residual(
    shape: tuple[int, int], dtype: torch.dtype, generator: torch.Generator
) -> None:
    def random(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, device=generator.device).to(dtype)

    x, residual = random(*shape), random(*shape)
    bias, weight, norm_bias = (random(shape[1]) for _ in range(3))
    expected = add_layer_norm_twin(x, bias, residual, weight, norm_bias, 1e-5)
    alone = add_layer_norm(x[-1:].clone(), bias, residual[-1:].clone(), weight, norm_bias, 1e-5)
    found = add_layer_norm(x, bias, residual, weight, norm_bias, 1e-5)
    assert found is residual
    tolerance = 3e-2 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(found.double(), expected, atol=tolerance, rtol=tolerance)
    assert torch.equal(found[-1:], alone)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(1, 16), (5, 384), (130, 1024)], ids=str)
def test_a_cpu_norms_a_sum_as_the_twin_does_and_alone_as_in_company(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    x, residual = (torch.randn(shape).to(dtype) for _ in range(2))
    # A mean far from zero, of which squares alone would keep few digits.
    residual += 100
    weight, bias = (torch.randn(shape[1]).to(dtype) for _ in range(2))
    expected = add_layer_norm_twin(x, torch.zeros(shape[1]), residual, weight, bias, 1e-5)
    alone = residual[-1:].clone()
    add_layer_norm_on_cpu(x[-1:].clone(), alone, weight, bias, 1e-5)
    add_layer_norm_on_cpu(x, residual, weight, bias, 1e-5)
    tolerance = 3e-2 if dtype == torch.bfloat16 else 1e-4
    torch.testing.assert_close(residual.double(), expected, atol=tolerance, rtol=tolerance)
    assert torch.equal(residual[-1:], alone)
