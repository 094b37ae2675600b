"""Copies of the latents that tokens attend to, each token's one after another, and the sequence of
each token of a batch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .latent_tiles import KEYS

LATENTS = 8
"""Latents of a program."""
TOKENS = 128
"""Tokens of a program that finds their sequences."""


def list_tokens(
    seq_lens: torch.Tensor,
    table_rows: torch.Tensor,
    query_starts: torch.Tensor,
    chunk_lens: torch.Tensor,
    chunk_rows: torch.Tensor,
    num_chosen: int,
    out: torch.Tensor,
) -> None:
    """Writes the number of latents that each token of a batch sees, its row of the block tables,
    and the number of latents that it attends to, at most `num_chosen`, to out int32 [3, T]; 0, 0, 0
    of a token of no sequence. The first tokens are those of seq_lens and table_rows int32 [D];
    sequence i has the tokens query_starts[i] … query_starts[i + 1] - 1, int32 [S + 1], the last of
    which sees chunk_lens[i] latents, int32 [S]; chunk_rows int32 [S] into the block tables."""
    num_tokens = out.shape[1]
    num_chunks = len(chunk_lens)
    _list_tokens[(triton.cdiv(num_tokens, TOKENS),)](
        seq_lens,
        table_rows,
        query_starts,
        chunk_lens,
        chunk_rows,
        out,
        num_tokens,
        len(seq_lens),
        num_chunks,
        num_chosen,
        TOKENS=TOKENS,
        num_warps=4,
    )


def gather_latents(
    cache: torch.Tensor,
    chosen: torch.Tensor,
    num_chosen: torch.Tensor,
    table_rows: torch.Tensor,
    block_tables: torch.Tensor,
    gathered: torch.Tensor,
) -> None:
    """Copies latents out of cache [num_blocks, block_size, width], whose rows may lie apart, to
    gathered [N, room, width], whose dtype may be a wider one: those at the first num_chosen[i],
    int32 [N], positions of chosen[i], int32 [N, room], and zeros up to the end of a tile of `KEYS`,
    whose multiple room is; table_rows int32 [N] into block_tables."""
    num_tokens, room, width = gathered.shape
    assert gathered.is_contiguous()
    assert cache.stride(2) == 1
    assert room % KEYS == 0
    _gather[(num_tokens, triton.cdiv(room, LATENTS))](
        cache,
        chosen,
        num_chosen,
        table_rows,
        block_tables,
        gathered,
        room,
        cache.stride(0),
        chosen.stride(0),
        block_tables.stride(0),
        stride_slot=cache.stride(1),
        PAGE=cache.shape[1],
        WIDTH=width,
        BLOCK_WIDTH=triton.next_power_of_2(width),
        LATENTS=LATENTS,
        KEYS=KEYS,
        num_warps=4,
    )


@triton.jit(do_not_specialize=["num_tokens", "num_decodes", "num_chunks", "most"])
def _list_tokens(
    p_seq_len,
    p_table_row,
    p_start,
    p_chunk_len,
    p_chunk_row,
    p_out,
    num_tokens,
    num_decodes,
    num_chunks,
    most,
    TOKENS: tl.constexpr,
):
    o_t = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    is_token = o_t < num_tokens
    is_decode = o_t < num_decodes
    b_len = tl.load(p_seq_len + o_t, mask=is_decode, other=0)
    b_row = tl.load(p_table_row + o_t, mask=is_decode, other=0)
    for i_chunk in range(num_chunks):
        end = tl.load(p_start + i_chunk + 1)
        is_own = (o_t >= tl.load(p_start + i_chunk)) & (o_t < end)
        b_len = tl.where(is_own, tl.load(p_chunk_len + i_chunk) - (end - 1 - o_t), b_len)
        b_row = tl.where(is_own, tl.load(p_chunk_row + i_chunk), b_row)
    tl.store(p_out + o_t, b_len, mask=is_token)
    tl.store(p_out + num_tokens + o_t, b_row, mask=is_token)
    tl.store(p_out + 2 * num_tokens + o_t, tl.minimum(b_len, most), mask=is_token)


@triton.jit(do_not_specialize=["room"])
def _gather(
    p_cache,
    p_chosen,
    p_num_chosen,
    p_table_row,
    p_table,
    p_out,
    room,
    stride_block,
    stride_chosen,
    stride_table,
    stride_slot: tl.constexpr,
    PAGE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    LATENTS: tl.constexpr,
    KEYS: tl.constexpr,
):
    i_token = tl.program_id(0).to(tl.int64)
    num_chosen = tl.load(p_num_chosen + i_token)
    first = tl.program_id(1) * LATENTS
    end = (num_chosen + KEYS - 1) // KEYS * KEYS
    if first < end:
        o_n = first + tl.arange(0, LATENTS)
        is_n = o_n < num_chosen
        b_position = tl.load(p_chosen + i_token * stride_chosen + o_n, mask=is_n, other=0)
        p_row = p_table + tl.load(p_table_row + i_token).to(tl.int64) * stride_table
        b_block = tl.load(p_row + b_position // PAGE, mask=is_n, other=0).to(tl.int64)
        p_latents = p_cache + (b_block * stride_block + b_position % PAGE * stride_slot)[:, None]
        o_c = tl.arange(0, BLOCK_WIDTH)[None, :]
        b_latents = tl.load(p_latents + o_c, mask=is_n[:, None] & (o_c < WIDTH), other=0.0)
        is_out = (o_n < end)[:, None] & (o_c < WIDTH)
        b_latents = b_latents.to(p_out.dtype.element_ty)
        tl.store(p_out + ((i_token * room + o_n) * WIDTH)[:, None] + o_c, b_latents, mask=is_out)
