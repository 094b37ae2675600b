"""Clears the last KV block of each request that a step begins. Pages that held fp32 states may
contain NaN in another dtype, and attention multiplies what follows a sequence's end by zero, which
leaves NaN."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

PIECES = 16
"""Number of programs that clear one block."""
BLOCK = 1024
"""Words that a program clears at once."""


def clear_begun(
    words: torch.Tensor,
    table_rows: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    block_table: torch.Tensor,
    max_blocks: int,
    block_size: int,
) -> None:
    """words int32 [num_blocks, words of a block or of a part of it], contiguous in a block. R
    requests compute positions
    `starts` to `ends` and are rows `table_rows` of the block table, int32 [R] each; padding ends at
    0. block_table int32 [rows, groups · max_blocks]: the blocks of each page group."""
    num_rows = len(table_rows)
    num_groups = block_table.shape[1] // max_blocks
    assert words.stride(1) == 1
    _clear_begun[(num_rows, num_groups, PIECES)](
        words,
        table_rows,
        starts,
        ends,
        block_table,
        words.shape[1],
        words.stride(0),
        block_table.stride(0),
        max_blocks,
        PAGE=block_size,
        BLOCK=BLOCK,
    )


def clear_begun_twin(
    words: torch.Tensor,
    table_rows: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    block_table: torch.Tensor,
    max_blocks: int,
    block_size: int,
) -> None:
    """`clear_begun` in plain torch, for a tensor of blocks of any dtype."""
    last = (ends.long() - 1).clamp(min=0) // block_size
    is_begun = (ends > 0) & (last * block_size >= starts)
    if not is_begun.any():
        return
    groups = torch.arange(block_table.shape[1] // max_blocks) * max_blocks
    columns = last[is_begun][:, None] + groups.to(last)
    words[block_table[table_rows[is_begun].long()[:, None], columns].long()] = 0


@triton.jit(do_not_specialize=["max_blocks"])
def _clear_begun(
    p_words,
    p_row,
    p_start,
    p_end,
    p_table,
    num_words,
    stride_words,
    stride_table,
    max_blocks,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i_r = tl.program_id(0)
    end = tl.load(p_end + i_r)
    last = (end - 1) // PAGE
    if (end <= 0) | (last * PAGE < tl.load(p_start + i_r)):
        return
    row = tl.load(p_row + i_r).to(tl.int64)
    block = tl.load(p_table + row * stride_table + tl.program_id(1) * max_blocks + last)
    p_block = p_words + block.to(tl.int64) * stride_words
    for first in range(tl.program_id(2) * BLOCK, num_words, tl.num_programs(2) * BLOCK):
        o_word = first + tl.arange(0, BLOCK)
        tl.store(p_block + o_word, 0, mask=o_word < num_words)
