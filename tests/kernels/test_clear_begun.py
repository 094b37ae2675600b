from __future__ import annotations

import torch

from headwater.kernels.blocks.clear_begun import clear_begun, clear_begun_twin

BLOCK_SIZE = 16
MAX_BLOCKS = 4
REQUESTS = [(1, 0, 3), (0, 15, 16), (2, 16, 17), (3, 5, 40), (0, 0, 0), (4, 8, 31)]
"""Row of the table, start and end: a prompt, tokens that fill a block and that begin one, a chunk
over two borders, padding, and a chunk that begins a block which it does not fill."""


def test_blocks_that_a_step_begins_are_cleared_and_others_stay(device: torch.device) -> None:
    words = torch.randint(1, 1 << 30, (41, 1500), dtype=torch.int32)
    table = torch.arange(1, 41, dtype=torch.int32).view(5, 2 * MAX_BLOCKS)
    expected = words.clone()
    for row, idx in [(1, 0), (2, 1), (3, 2), (4, 1)]:
        for group in (0, MAX_BLOCKS):
            expected[table[row, group + idx]] = 0
    requests = torch.tensor(REQUESTS, dtype=torch.int32).unbind(1)
    twin = words.clone()
    clear_begun_twin(twin, *requests, table, MAX_BLOCKS, BLOCK_SIZE)
    assert torch.equal(twin, expected)
    words = words.to(device)
    given = (each.to(device).contiguous() for each in requests)
    clear_begun(words, *given, table.to(device), MAX_BLOCKS, BLOCK_SIZE)
    assert torch.equal(words.cpu(), expected)
