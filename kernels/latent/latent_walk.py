"""Walk of a program of attention over latents, piece by piece: over splits of decoding rows, or
over tiles of rows of prompts' chunks.

Decoding rows are chunks of one token. A piece is at most 64 query rows of one sequence, tokens
times heads, and a range of its keys.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def places_of(walk, HEADS: tl.constexpr, DECODES: tl.constexpr):
    """First place of a program's work and the end of it: splits among all of a plan, or rounds of
    tiles. `walk`: the plan's starts of ranges, its rows of splits or the list of tiles, its first
    partials, lengths of sequences, their rows of the block tables, starts of queries, and the
    number of tiles."""
    if DECODES:
        TILES: tl.constexpr = (HEADS + 63) // 64
        i_range = tl.program_id(0) // TILES
        first = tl.load(walk[0] + i_range)
        end = tl.load(walk[0] + i_range + 1)
    else:
        first = tl.program_id(0) * 0
        end = (walk[6] + tl.num_programs(0) - 1) // tl.num_programs(0)
    return first, end


@triton.jit
def piece_at(walk, place, last, HEADS: tl.constexpr, SPLIT: tl.constexpr, DECODES: tl.constexpr):
    """The piece at a place: its rows, as first of the queries, number, and first of the sequence's
    chunk; the position of the chunk's first token; the sequence's row of the block tables; its keys
    as first and end; the place of its partial result in rows, and whether that is the result; and
    the place of the next piece. A piece without keys is none."""
    if DECODES:
        TILES: tl.constexpr = (HEADS + 63) // 64
        i_row = tl.load(walk[1] + place)
        i_split = place - tl.load(walk[2] + i_row)
        seq_len = tl.load(walk[3] + i_row)
        num_splits = (seq_len + SPLIT - 1) // SPLIT
        count = tl.where(i_split == 0, tl.minimum(num_splits, last - place), 1)
        first_row = tl.program_id(0) % TILES * 64
        rows = (i_row * HEADS + first_row, HEADS - first_row, first_row)
        context = seq_len - 1
        first = i_split * SPLIT
        end = tl.minimum(first + count * SPLIT, seq_len)
        partial = place * HEADS + first_row
        is_whole = (i_split == 0) & (end == seq_len)
        after = place + count
        table_row = tl.load(walk[4] + i_row)
    else:
        # Every other round goes backwards, so that tiles ordered by length add up alike.
        i_program = tl.where(
            place % 2 == 1, tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(0)
        )
        i_tile = place * tl.num_programs(0) + i_program
        i_seq = tl.load(walk[1] + i_tile * 2, mask=i_tile < walk[6], other=-1)
        is_there = i_seq >= 0
        first_row = tl.load(walk[1] + i_tile * 2 + 1, mask=is_there, other=0)
        i_seq = tl.maximum(i_seq, 0)
        query_start = tl.load(walk[5] + i_seq)
        num_tokens = tl.load(walk[5] + i_seq + 1) - query_start
        rows = (query_start * HEADS + first_row, num_tokens * HEADS - first_row, first_row)
        context = tl.load(walk[3] + i_seq) - num_tokens
        first = place * 0
        end = context + tl.minimum((first_row + 63) // HEADS, num_tokens - 1) + 1
        end = tl.where(is_there, end, 0)
        partial = place * 0
        is_whole = end >= 0
        after = place + 1
        table_row = tl.load(walk[4] + i_seq)
    return rows, context, table_row, (first, end), partial, is_whole, after
