from __future__ import annotations

import pytest
import torch

from headwater.kernels.sampling.logprobs import logprobs, logprobs_of, logprobs_twin
from tests.kernels.paging import GPU


@pytest.mark.parametrize("num_top", [0, 1, 5])
@pytest.mark.parametrize(
    ("rows", "vocab"), [(1, 100), (3, 9001), pytest.param(64, 151_936, marks=GPU)]
)
def test_logprobs_agree_with_float64(
    rows: int, vocab: int, num_top: int, generator: torch.Generator
) -> None:
    device = generator.device
    # Rounded coarsely, so that there are ties among the likeliest.
    logits = (torch.randn(rows, vocab, generator=generator, device=device) * 8).round() / 2
    logits[:, 3] = float("-inf")
    tokens = torch.randint(4, vocab, (rows,), generator=generator, device=device, dtype=torch.int32)
    out, top_ids, top = logprobs_of(logits, tokens, num_top)
    chosen_ref, ids_ref, top_ref = logprobs_twin(logits.double(), tokens, num_top)
    torch.testing.assert_close(out.double(), chosen_ref, rtol=0, atol=1e-4)
    torch.testing.assert_close(top.double(), top_ref, rtol=0, atol=1e-4)
    assert torch.equal(top_ids, ids_ref)


def test_rows_ask_for_different_numbers_or_for_none(generator: torch.Generator) -> None:
    """Into columns of one table, as a step's results lie; what nobody asked for is left as it
    was."""
    device = generator.device
    num_tops = torch.tensor([2, -1, 0, 3], dtype=torch.int32, device=generator.device)
    logits = torch.randn(4, 500, generator=generator, device=device)
    tokens = torch.tensor([5, 6, 7, 8], dtype=torch.int32, device=device)
    words = torch.full((4, 7), -7, dtype=torch.int32, device=device)
    logprobs(
        logits,
        tokens,
        num_tops,
        words.view(torch.float32)[:, 0],
        words[:, 1:4],
        words.view(torch.float32)[:, 4:],
    )
    chosen, ids, top = logprobs_of(logits, tokens, 3)
    for i, num_top in enumerate(num_tops.tolist()):
        expected = torch.full((7,), -7, dtype=torch.int32, device=device)
        if num_top >= 0:
            expected[0] = chosen.view(torch.int32)[i]
            expected[1 : 1 + num_top] = ids[i, :num_top]
            expected[4 : 4 + num_top] = top.view(torch.int32)[i, :num_top]
        assert torch.equal(words[i], expected)
