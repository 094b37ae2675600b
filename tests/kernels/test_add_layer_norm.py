from __future__ import annotations

import pytest
import torch

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
