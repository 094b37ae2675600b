from __future__ import annotations

import pytest
import torch

from headwater.kernels.sampling.token_mask import LOWEST, mask_tokens, mask_tokens_twin
from tests.kernels.paging import GPU, POISON


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("rows", "vocab"), [(1, 33), (3, 5000), pytest.param(256, 151_936, marks=GPU)]
)
def test_only_what_the_mask_allows_is_left(
    rows: int, vocab: int, dtype: torch.dtype, generator: torch.Generator
) -> None:
    device = generator.device
    logits = torch.randn(rows, vocab, generator=generator, device=device).to(dtype)
    logits[:, ::7] = float("-inf")
    is_allowed = torch.rand(rows, -(-vocab // 32) * 32, generator=generator, device=device) < 0.3
    # The highest bit is the sign.
    powers = 2 ** torch.arange(32, device=device)
    masks = (is_allowed.view(rows, -1, 32) * powers).sum(2).to(torch.int32)
    out = torch.full((rows, vocab), POISON, device=device)
    mask_tokens(logits, masks, out)
    expected = torch.where(is_allowed[:, :vocab], logits.float().clamp(min=LOWEST), float("-inf"))
    assert torch.equal(out, expected)
    assert torch.equal(mask_tokens_twin(logits, masks), expected)


def test_a_row_may_be_masked_in_place(device: torch.device) -> None:
    logits = torch.zeros(1, 40, device=device)
    mask_tokens(logits, torch.tensor([[1 << 5, 1]], dtype=torch.int32, device=device), logits)
    assert torch.isfinite(logits[0]).nonzero().flatten().tolist() == [5, 32]
