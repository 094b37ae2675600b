"""The request table on the device: a step reads it, and sampling writes it. Knows nothing about
models.

Row -1 pads a graph: its token is 0, its slot is negative, and nothing is written for it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..sampling.filtered_sample import Filters
from ..sampling.sample import Draws

PARAM_WORDS = 8
"""Number of 32-bit words in a row's state: seed (two), choice, temperature, top-k, top-p, min-p,
and the slot of its adapter."""
ADAPTER_WORD = 7
_BLOCK = 256


def scatter_words(words: torch.Tensor, indices: torch.Tensor, values: torch.Tensor) -> None:
    """Writes values to words int32 [N] at indices; indices and values int32 [U]."""
    num_updates = len(indices)
    _scatter_words[(triton.cdiv(num_updates, _BLOCK),)](
        words, indices, values, num_updates, BLOCK=_BLOCK
    )


def load_tokens(
    rows: torch.Tensor,
    positions: torch.Tensor,
    token_table: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    token_ids: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """Writes token_ids and slots, integers [T] and [G, T], of rows and positions int32 [T]; tables
    int32 [rows, …], that of blocks with as many columns for each of G page groups."""
    num_tokens = len(rows)
    num_groups = len(slots)
    _load_tokens[(triton.cdiv(num_tokens, _BLOCK), num_groups)](
        rows,
        positions,
        token_table,
        block_table,
        token_ids,
        slots,
        token_table.stride(0),
        block_table.stride(0),
        block_table.shape[1] // num_groups,
        slots.stride(0),
        num_tokens,
        PAGE=block_size,
        BLOCK=_BLOCK,
    )


def load_draws(params: torch.Tensor, rows: torch.Tensor, draws: Draws, filters: Filters) -> None:
    """Fills all draws but the output indices from params int32 [rows, PARAM_WORDS] of rows int32
    [S]. Padding rows are greedy."""
    _load_draws[(triton.cdiv(len(rows), _BLOCK),)](
        params,
        rows,
        draws.temperatures,
        draws.seeds,
        draws.choice_indices,
        filters.top_ks,
        filters.top_ps,
        filters.min_ps,
        len(rows),
        WORDS=PARAM_WORDS,
        BLOCK=_BLOCK,
    )


def load_adapters(rows: torch.Tensor, params: torch.Tensor) -> torch.Tensor:
    """int32 [T] slots of the adapters of rows int32 [T], from params int32 [rows, PARAM_WORDS].
    Padding rows have none: −1."""
    slots = torch.empty_like(rows)
    num_rows = len(rows)
    _load_adapters[(triton.cdiv(num_rows, _BLOCK),)](
        rows, params, slots, num_rows, WORDS=PARAM_WORDS, WORD=ADAPTER_WORD, BLOCK=_BLOCK
    )
    return slots


def store_tokens(
    rows: torch.Tensor,
    positions: torch.Tensor,
    token_ids: torch.Tensor,
    token_table: torch.Tensor,
    results: torch.Tensor,
    first_result: torch.Tensor,
) -> None:
    """Writes each row's sampled token, int32 [S], behind its last position and to results.

    results int32 [parts, max rows], in pinned memory of the host, so that no copy has to follow:
    from word first_result, int32 [1], on.
    """
    _store_tokens[(triton.cdiv(len(rows), _BLOCK),)](
        rows,
        positions,
        token_ids,
        token_table,
        results,
        first_result,
        token_table.stride(0),
        len(rows),
        BLOCK=_BLOCK,
    )


def load_tokens_twin(
    rows: torch.Tensor,
    positions: torch.Tensor,
    token_table: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    num_groups: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids [T] and slots [G, T] in plain torch."""
    is_row = rows >= 0
    at = rows.long().clamp(min=0)
    position = positions.long()
    tables = block_table.view(len(block_table), num_groups, -1)
    slots = tables[at, :, position // block_size].T * block_size + positions % block_size
    return torch.where(is_row, token_table[at, position], 0), torch.where(is_row, slots, -1)


def load_draws_twin(params: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Temperatures, seeds, choice indices, top-k, top-p and min-p [S] in plain torch."""
    padding = torch.zeros(1, PARAM_WORDS, dtype=torch.int32, device=params.device)
    padding[0, 5] = torch.tensor(1.0).view(torch.int32)
    words = torch.cat((params, padding))[rows.long()]
    floats = words.view(torch.float32)
    return (
        floats[:, 3],
        words[:, :2].contiguous().view(torch.int64)[:, 0],
        words[:, 2],
        words[:, 4],
        *floats[:, 5:7].T,
    )


def store_tokens_twin(
    rows: torch.Tensor,
    positions: torch.Tensor,
    token_ids: torch.Tensor,
    token_table: torch.Tensor,
    results: torch.Tensor,
    first_result: torch.Tensor,
) -> None:
    kept = torch.nonzero(rows >= 0)[:, 0]
    token_table[rows[kept].long(), positions[kept].long() + 1] = token_ids[kept]
    results.view(-1)[int(first_result) + kept] = token_ids[kept]


# One kernel serves any number of them, at any address.
@triton.jit(
    do_not_specialize=["num_updates"], do_not_specialize_on_alignment=["p_index", "p_value"]
)
def _scatter_words(p_word, p_index, p_value, num_updates, BLOCK: tl.constexpr):
    o_u = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = o_u < num_updates
    tl.store(
        p_word + tl.load(p_index + o_u, mask=inside, other=0),
        tl.load(p_value + o_u, mask=inside),
        mask=inside,
    )


@triton.jit(do_not_specialize=["num_rows"])
def _load_adapters(
    p_row, p_param, p_slot, num_rows, WORDS: tl.constexpr, WORD: tl.constexpr, BLOCK: tl.constexpr
):
    o_r = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = o_r < num_rows
    b_row = tl.load(p_row + o_r, mask=inside, other=-1)
    b_slot = tl.load(p_param + b_row * WORDS + WORD, mask=b_row >= 0, other=-1)
    tl.store(p_slot + o_r, b_slot, mask=inside)


@triton.jit(do_not_specialize=["num_tokens", "max_blocks", "stride_slot"])
def _load_tokens(
    p_row,
    p_position,
    p_token,
    p_block,
    p_token_id,
    p_slot,
    stride_token,
    stride_block,
    max_blocks,
    stride_slot,
    num_tokens,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i_group = tl.program_id(1)
    o_t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = o_t < num_tokens
    b_row = tl.load(p_row + o_t, mask=inside, other=-1)
    b_position = tl.load(p_position + o_t, mask=inside, other=0)
    is_row = b_row >= 0
    b_token = tl.load(
        p_token + b_row.to(tl.int64) * stride_token + b_position, mask=is_row, other=0
    )
    b_block = tl.load(
        p_block + b_row.to(tl.int64) * stride_block + i_group * max_blocks + b_position // PAGE,
        mask=is_row,
        other=0,
    )
    # Programs of all groups store the same token ids.
    tl.store(p_token_id + o_t, b_token, mask=inside)
    tl.store(
        p_slot + i_group * stride_slot + o_t,
        tl.where(is_row, b_block * PAGE + b_position % PAGE, -1),
        mask=inside,
    )


@triton.jit(do_not_specialize=["num_rows"])
def _load_draws(
    p_param,
    p_row,
    p_temperature,
    p_seed,
    p_choice,
    p_top_k,
    p_top_p,
    p_min_p,
    num_rows,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    o_r = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = o_r < num_rows
    b_row = tl.load(p_row + o_r, mask=inside, other=-1)
    is_row = b_row >= 0
    p_words = p_param + b_row * WORDS
    b_low = tl.load(p_words, mask=is_row, other=0).to(tl.int64) & 0xFFFFFFFF
    b_high = tl.load(p_words + 1, mask=is_row, other=0).to(tl.int64)
    tl.store(p_seed + o_r, (b_high << 32) | b_low, mask=inside)
    tl.store(p_choice + o_r, tl.load(p_words + 2, mask=is_row, other=0), mask=inside)
    b_temperature = tl.load(p_words + 3, mask=is_row, other=0).to(tl.float32, bitcast=True)
    tl.store(p_temperature + o_r, b_temperature, mask=inside)
    tl.store(p_top_k + o_r, tl.load(p_words + 4, mask=is_row, other=0), mask=inside)
    b_top_p = tl.load(p_words + 5, mask=is_row, other=0x3F800000).to(tl.float32, bitcast=True)
    tl.store(p_top_p + o_r, b_top_p, mask=inside)
    b_min_p = tl.load(p_words + 6, mask=is_row, other=0).to(tl.float32, bitcast=True)
    tl.store(p_min_p + o_r, b_min_p, mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def _store_tokens(
    p_row,
    p_position,
    p_token,
    p_table,
    p_result,
    p_first_result,
    stride_table,
    num_rows,
    BLOCK: tl.constexpr,
):
    o_r = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = o_r < num_rows
    b_row = tl.load(p_row + o_r, mask=inside, other=-1)
    is_row = b_row >= 0
    b_next = tl.load(p_position + o_r, mask=is_row, other=0) + 1
    b_token = tl.load(p_token + o_r, mask=is_row, other=0)
    tl.store(p_table + b_row.to(tl.int64) * stride_table + b_next, b_token, mask=is_row)
    tl.store(p_result + tl.load(p_first_result) + o_r, b_token, mask=is_row)
