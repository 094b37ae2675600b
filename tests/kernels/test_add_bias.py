from __future__ import annotations

import pytest
import torch

from headwater.kernels.gemm.add_bias import add_bias


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
