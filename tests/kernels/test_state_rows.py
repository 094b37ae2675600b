from __future__ import annotations

import pytest
import torch

from headwater.kernels.rows.state_rows import (
    SetColumns,
    StepRequests,
    load_state_rows,
    load_state_rows_twin,
)

BLOCK_SIZE = 16
MAX_BLOCKS = 16


@pytest.mark.parametrize("state_pages", [1, 3])
def test_requests_find_the_sets_of_their_first_block_and_of_the_one_behind_their_last_token(
    state_pages: int, device: torch.device
) -> None:
    columns = SetColumns(MAX_BLOCKS, 2 * MAX_BLOCKS + 1, state_pages)
    table = torch.zeros(4, columns.first_page + 3 * state_pages, dtype=torch.int32)
    table[:, columns.first_page :] = torch.arange(100, 100 + 12 * state_pages).view(4, -1)
    # By row and block of the sequence, the place of its state set.
    for row, idx, place in [(1, 0, 2), (1, 1, 1), (2, 5, 2), (3, 0, 1), (3, 7, 2), (3, 16, 0)]:
        table[row, columns.first_place + idx] = place
    requests = StepRequests(
        decode_rows=torch.tensor([1, 1, 2, 0]),
        decode_ends=torch.tensor([15, 16, 96, 0]),
        chunk_rows=torch.tensor([3, 3, 0]),
        chunk_ends=torch.tensor([112, 256, 0]),
        query_starts=torch.tensor([3, 115, 259, 259]),
    )
    requests = StepRequests(*(each.to(device, torch.int32) for each in requests))
    table = table.to(device)
    made = load_state_rows(requests, table, columns, BLOCK_SIZE)
    twin = load_state_rows_twin(requests, table, columns, BLOCK_SIZE)
    for found, expected in zip(made, twin, strict=True):
        assert found.tolist() == expected.tolist()
    assert made.starts.tolist() == [14, 15, 95, 0, 0, 112, 0]
    assert made.ends.tolist() == [15, 16, 96, 0, 112, 256, 0]
    assert made.tokens.tolist()[:3] + made.tokens.tolist()[4:6] == [0, 1, 2, 3, 115]

    def pages(row: int, place: int) -> list[int]:
        first = 100 + (3 * row + place) * state_pages
        return list(range(first, first + state_pages))

    none = [0] * state_pages
    assert made.first.tolist() == [
        pages(1, 2), pages(1, 2), pages(2, 2), none, pages(3, 1), pages(3, 2), none
    ]  # fmt: skip
    assert made.last.tolist()[:2] == [pages(1, 2), pages(1, 1)]
    assert made.last.tolist()[4:] == [pages(3, 2), pages(3, 0), none]
