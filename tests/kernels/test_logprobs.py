from __future__ import annotations

import pytest
import torch

from headwater.kernels.logprobs import logprobs, logprobs_twin
from tests.kernels.paging import GPU, POISON


@pytest.mark.parametrize("num_top", [0, 1, 5])
@pytest.mark.parametrize(("rows", "vocab"), [(1, 100), (3, 9001), pytest.param(64, 151_936, marks=GPU)])
def test_logprobs_agree_with_float64(rows: int, vocab: int, num_top: int, generator: torch.Generator) -> None:
    device = generator.device
    # Rounded coarsely, so that there are ties among the likeliest.
    logits = (torch.randn(rows, vocab, generator=generator, device=device) * 8).round() / 2
    logits[:, 3] = float("-inf")
    tokens = torch.randint(4, vocab, (rows,), generator=generator, device=device, dtype=torch.int32)
    out = torch.full((rows,), POISON, device=device)
    top_ids = torch.full((rows, num_top), -1, dtype=torch.int32, device=device)
    top = torch.full((rows, num_top), POISON, device=device)
    logprobs(logits, tokens, out, top_ids, top)
    chosen_ref, ids_ref, top_ref = logprobs_twin(logits.double(), tokens, num_top)
    torch.testing.assert_close(out.double(), chosen_ref, rtol=0, atol=1e-4)
    torch.testing.assert_close(top.double(), top_ref, rtol=0, atol=1e-4)
    assert torch.equal(top_ids, ids_ref)
