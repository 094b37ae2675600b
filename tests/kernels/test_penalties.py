from __future__ import annotations

import pytest
import torch

from headwater.kernels.penalties import count_outputs, penalize, penalize_twin
from tests.kernels.paging import GPU, POISON, relative_error


@pytest.mark.parametrize(("rows", "vocab"), [(1, 100), (3, 5000), pytest.param(64, 151_936, marks=GPU)])
def test_penalties_agree_with_float64(rows: int, vocab: int, generator: torch.Generator) -> None:
    device = generator.device
    logits = torch.randn(rows, vocab, generator=generator, device=device).bfloat16() * 4
    counts = torch.randint(-4, 4, (rows + 2, vocab), generator=generator, device=device).clamp(min=0).short()
    in_prompt = torch.rand(rows + 2, vocab, generator=generator, device=device) < 0.2
    table_rows = torch.randperm(rows + 2, generator=generator, device=device)[:rows].int()
    repetition = torch.rand(rows, generator=generator, device=device) + 0.7
    presence, frequency = (torch.rand(rows, generator=generator, device=device) * 2 - 1 for _ in range(2))
    out = torch.full((rows, vocab), POISON, device=device)
    penalize(logits, counts, in_prompt, table_rows, repetition, presence, frequency, out)
    chosen = table_rows.long()
    twin = penalize_twin(logits.double(), counts[chosen], in_prompt[chosen], repetition, presence, frequency)
    assert relative_error(out, twin) < 1e-6


def test_outputs_are_counted_and_negative_tokens_skipped(device: torch.device) -> None:
    counts = torch.zeros(4, 10, dtype=torch.int16, device=device)
    rows = torch.tensor([3, 0, 1], dtype=torch.int32, device=device)
    for _ in range(2):
        count_outputs(counts, rows, torch.tensor([9, -1, 4], dtype=torch.int32, device=device))
    assert counts.nonzero().tolist() == [[1, 4], [3, 9]]
    assert counts.sum().item() == 4
