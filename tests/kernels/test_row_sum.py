from __future__ import annotations

import pytest
import torch

from headwater.kernels.norm.row_sum import MOST_BLOCK, row_sum, row_sum_twin
from tests.kernels.paging import GPU, relative_error

SHAPES = [
    (1, 64),
    (5, 576),
    (3, MOST_BLOCK + 300),
    pytest.param(257, 4096, marks=GPU),
    pytest.param(4096, 128, marks=GPU),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_rows", "width"), SHAPES)
def test_a_sum_agrees_with_float64(
    num_rows: int, width: int, dtype: torch.dtype, generator: torch.Generator
) -> None:
    x = torch.rand(num_rows, width, generator=generator, device=generator.device).to(dtype)
    bound = 1e-6 if dtype is torch.float32 else 4e-3
    assert row_sum(x).dtype is dtype
    assert relative_error(row_sum(x), row_sum_twin(x.double())) < bound


@pytest.mark.parametrize(("num_rows", "width"), SHAPES)
def test_a_row_has_the_same_bits_alone(
    num_rows: int, width: int, generator: torch.Generator
) -> None:
    x = torch.randn(num_rows, width, generator=generator, device=generator.device)
    assert torch.equal(row_sum(x)[-1:], row_sum(x[-1:]))
