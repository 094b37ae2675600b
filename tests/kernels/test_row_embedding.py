from __future__ import annotations

import pytest
import torch

from headwater.kernels.row_embedding import row_embedding, row_embedding_twin
from tests.kernels.paging import POISON


@pytest.mark.parametrize("row", [-1, 0, 2])
def test_the_embedding_is_that_of_the_row_s_token(row: int, generator: torch.Generator) -> None:
    device = generator.device
    table = torch.randint(1, 50, (3, 9), generator=generator, device=device, dtype=torch.int32)
    embeddings = torch.randn(50, 72, generator=generator, device=device).bfloat16()
    where = [torch.tensor([value], dtype=torch.int32, device=device) for value in (row, 7)]
    out = embeddings.new_full((72,), POISON)
    row_embedding(*where, table, embeddings, out)
    assert torch.equal(out, row_embedding_twin(*where, table, embeddings))
