"""Sums of experts and a gated shared expert: against float64, and the bits of a token by itself."""

from __future__ import annotations

import pytest
import torch

from headwater.kernels.experts.gated_sum import gated_sum, gated_sum_twin


@pytest.mark.parametrize("width", [64, 96, 2048])
@pytest.mark.parametrize(
    ("dtype", "close"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)], ids=["float32", "bf16"]
)
def test_sums_are_those_of_the_twin_and_of_each_token_by_itself(
    generator: torch.Generator, dtype: torch.dtype, close: float, width: int
) -> None:
    device = generator.device

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device).to(dtype)

    out, shared, both = drawn(5, width), drawn(5, width), drawn(5, 2 * width)
    x = both[:, :width]
    gate = (drawn(1, width) / width**0.5).to(dtype)
    expected = gated_sum_twin(out, shared, x, gate)
    alone = torch.cat(
        [gated_sum(out[i : i + 1], shared[i : i + 1], x[i : i + 1], gate) for i in range(5)]
    )

    found = gated_sum(out, shared, x, gate)

    torch.testing.assert_close(found.double(), expected, rtol=close, atol=close)
    assert torch.equal(found, alone)
