from __future__ import annotations

import pytest
import torch

from headwater.kernels.silu_mul import gelu_tanh_mul, gelu_tanh_mul_twin, silu_mul, silu_mul_twin
from tests.kernels.paging import GPU, POISON, relative_error


@pytest.mark.parametrize(("num_tokens", "width"), [(1, 64), (3, 1536), (2, 1111), pytest.param(129, 12288, marks=GPU)])
def test_silu_mul_agrees_with_float64(num_tokens: int, width: int, generator: torch.Generator) -> None:
    x = torch.randn(num_tokens, 2 * width, generator=generator, device=generator.device).bfloat16() * 3
    out = silu_mul(x, x.new_full((num_tokens, width), POISON))
    assert relative_error(out, silu_mul_twin(x.double())) < 3e-3


@pytest.mark.parametrize(("num_tokens", "width"), [(1, 64), (2, 1111), pytest.param(129, 6912, marks=GPU)])
def test_gelu_tanh_mul_agrees_with_float64(num_tokens: int, width: int, generator: torch.Generator) -> None:
    x = torch.randn(num_tokens, 2 * width, generator=generator, device=generator.device).bfloat16()
    out = gelu_tanh_mul(x, x.new_full((num_tokens, width), POISON))
    assert relative_error(out, gelu_tanh_mul_twin(x.double())) < 3e-3
