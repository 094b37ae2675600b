from __future__ import annotations

import pytest
import torch

from headwater.kernels.norm.span_means import span_means, span_means_twin


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_span_has_the_mean_of_its_rows_and_the_same_bits_elsewhere(
    dtype: torch.dtype, generator: torch.Generator
) -> None:
    device = generator.device
    states = torch.randn(150, 200, generator=generator, device=device).to(dtype)
    spans = torch.tensor([[140, 1], [3, 70], [0, 3]], dtype=torch.int32, device=device)
    found = span_means(states, spans)
    torch.testing.assert_close(found, span_means_twin(states, spans), atol=1e-6, rtol=1e-6)
    assert torch.equal(found[0], states[140].float())
    alone = span_means(states[3:73].contiguous(), torch.tensor([[0, 70]], device=device).int())
    assert torch.equal(alone[0], found[1])
