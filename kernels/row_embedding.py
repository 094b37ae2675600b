"""The embedding of the one token that a step of one row computes, read through the request table."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headwater.kernels.dependent_launch import release_dependents


def row_embedding(
    row: torch.Tensor,
    position: torch.Tensor,
    token_table: torch.Tensor,
    embeddings: torch.Tensor,
    out: torch.Tensor,
    *,
    releases: bool = False,
) -> None:
    """row int32 [1] of token_table int32 [rows, positions], -1: token 0; embeddings [V, H]; writes out [H]. It begins
    when all before it has ended; with `releases` a dependent launch may begin at once."""
    assert embeddings.is_contiguous()
    hidden = len(out)
    _row_embedding[(1,)](
        row,
        position,
        token_table,
        embeddings,
        out,
        token_table.stride(0),
        hidden,
        BLOCK=triton.next_power_of_2(hidden),
        RELEASES=releases,
        num_warps=4,
    )


def row_embedding_twin(
    row: torch.Tensor, position: torch.Tensor, token_table: torch.Tensor, embeddings: torch.Tensor
) -> torch.Tensor:
    return embeddings[torch.where(row < 0, 0, token_table[row.long(), position.long()]).long()][0]


@triton.jit
def _row_embedding(
    p_row,
    p_position,
    p_token,
    p_embedding,
    p_out,
    stride_token,
    hidden,
    BLOCK: tl.constexpr,
    RELEASES: tl.constexpr,
):
    release_dependents(RELEASES)
    row = tl.load(p_row)
    token = tl.load(p_token + row.to(tl.int64) * stride_token + tl.load(p_position), mask=row >= 0, other=0)
    o_h = tl.arange(0, BLOCK)
    b_x = tl.load(p_embedding + token.to(tl.int64) * hidden + o_h, mask=o_h < hidden)
    tl.store(p_out + o_h, b_x, mask=o_h < hidden)
