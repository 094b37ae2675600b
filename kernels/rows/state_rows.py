"""State sets of a step's requests, by the block table on the device: where their pages are, and
which positions the requests compute. Knows nothing about what is in a set."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl


class SetColumns(NamedTuple):
    """Columns of a block table; see `TableColumns`."""

    first_place: int
    first_page: int
    state_pages: int


class StateTensors(NamedTuple):
    """Tensors of `StateRows`, and the requests' rows of the table, int32 [D + C]."""

    rows: torch.Tensor
    first: torch.Tensor
    last: torch.Tensor
    starts: torch.Tensor
    ends: torch.Tensor
    tokens: torch.Tensor


class StepRequests(NamedTuple):
    """Requests of a step, int32: D that decode, then C chunks. Padding ends at 0."""

    decode_rows: torch.Tensor
    """[D] of the request table."""
    decode_ends: torch.Tensor
    """[D] position after the token."""
    chunk_rows: torch.Tensor
    """[C] of the request table."""
    chunk_ends: torch.Tensor
    """[C] position after the last token."""
    query_starts: torch.Tensor
    """[C + 1] into the tokens."""


def load_state_rows(
    requests: StepRequests, block_table: torch.Tensor, columns: SetColumns, block_size: int
) -> StateTensors:
    """block_table int32 [rows, columns]. Padding reads page 0, from 0 to 0."""
    num_decodes = len(requests.decode_rows)
    num_rows = num_decodes + len(requests.chunk_rows)
    rows, starts, ends, tokens = block_table.new_empty(4, num_rows)
    first, last = block_table.new_empty(2, num_rows, columns.state_pages)
    made = StateTensors(rows, first, last, starts, ends, tokens)
    _load_state_rows[(num_rows,)](
        *requests,
        block_table,
        *made,
        block_table.stride(0),
        num_decodes,
        *columns,
        PAGE=block_size,
        BLOCK=triton.next_power_of_2(columns.state_pages),
    )
    return made


def load_state_rows_twin(
    requests: StepRequests, block_table: torch.Tensor, columns: SetColumns, block_size: int
) -> StateTensors:
    """`load_state_rows` in plain torch."""
    num_decodes = len(requests.decode_rows)
    rows = torch.cat((requests.decode_rows, requests.chunk_rows)).long()
    ends = torch.cat((requests.decode_ends, requests.chunk_ends))
    counts = torch.cat((ends[:num_decodes].clamp(max=1), requests.query_starts.diff()))
    is_row = ends > 0
    starts = torch.where(is_row, ends - counts, 0)
    tokens = torch.cat((torch.arange(num_decodes).to(ends), requests.query_starts[:-1]))

    def pages_of(positions: torch.Tensor) -> torch.Tensor:
        places = block_table[rows, columns.first_place + positions.long() // block_size]
        first = columns.first_page + places.long() * columns.state_pages
        of_set = first[:, None] + torch.arange(columns.state_pages, device=first.device)
        return torch.where(is_row[:, None], block_table[rows[:, None], of_set], 0)

    return StateTensors(rows, pages_of(starts), pages_of(ends), starts, ends, tokens)


@triton.jit(do_not_specialize=["num_decodes", "first_place", "first_page", "num_pages"])
def _load_state_rows(
    p_decode_row,
    p_decode_end,
    p_chunk_row,
    p_chunk_end,
    p_query,
    p_table,
    p_table_row,
    p_first,
    p_last,
    p_start,
    p_end,
    p_token,
    stride_table,
    num_decodes,
    first_place,
    first_page,
    num_pages,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i_r = tl.program_id(0)
    if i_r < num_decodes:
        row = tl.load(p_decode_row + i_r)
        end = tl.load(p_decode_end + i_r)
        token = i_r
        start = tl.maximum(end - 1, 0)
    else:
        i_chunk = i_r - num_decodes
        row = tl.load(p_chunk_row + i_chunk)
        end = tl.load(p_chunk_end + i_chunk)
        token = tl.load(p_query + i_chunk)
        count = tl.load(p_query + i_chunk + 1) - token
        start = tl.where(end > 0, end - count, 0)
    tl.store(p_table_row + i_r, row)
    tl.store(p_start + i_r, start)
    tl.store(p_end + i_r, end)
    tl.store(p_token + i_r, token)
    p_row = p_table + row.to(tl.int64) * stride_table
    first_set = tl.load(p_row + first_place + start // PAGE)
    last_set = tl.load(p_row + first_place + end // PAGE)
    o_p = tl.arange(0, BLOCK)
    inside = o_p < num_pages
    is_read = inside & (end > 0)
    b_first = tl.load(p_row + first_page + first_set * num_pages + o_p, mask=is_read, other=0)
    b_last = tl.load(p_row + first_page + last_set * num_pages + o_p, mask=is_read, other=0)
    tl.store(p_first + i_r * num_pages + o_p, b_first, mask=inside)
    tl.store(p_last + i_r * num_pages + o_p, b_last, mask=inside)
