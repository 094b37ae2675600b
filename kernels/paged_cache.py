"""How kernels read a tile of keys or values out of KV blocks. Knows nothing about attention.

A cache is [num_blocks, Hk, block_size, D]; a sequence's block table names its blocks in order.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tile_offsets(p_table_row, first, end, stride_block, stride_slot, PAGE: tl.constexpr, TILE: tl.constexpr):
    """Offsets of keys first … first + TILE - 1 within one head's plane, [TILE] int64; first is a multiple of TILE.

    Keys from `end` on get the offset of the last one before it: masked later, but never read from a foreign address.
    """
    o_n = first + tl.arange(0, TILE)
    if PAGE >= TILE:
        page = tl.load(p_table_row + first // PAGE).to(tl.int64)
        return page * stride_block + (o_n % PAGE) * stride_slot
    else:
        o_n = tl.minimum(o_n, end - 1)
        b_page = tl.load(p_table_row + o_n // PAGE).to(tl.int64)
        return b_page * stride_block + (o_n % PAGE) * stride_slot
