"""Times attention of layers that see a window, beside what memory allows and beside the rate of
layers that see all keys: figures of `gpu_kernels`.

Sequences are longer than the window. Pages before it are given back, so that tables name page 0
there.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from headwater.engine_core.executors.model.kv_blocks import KvBlocks, KvLayout
from headwater.engine_core.platforms.cuda_attention import attention_kernels
from headwater.kernels.attention.decode_plan import DecodePlan, plan_decode
from headwater.kernels.attention.prefill_attention import prefill_tiles, tokens_per_tile

from .gpu_timing import BYTES_PER_US, FLOPS_PER_US, Figure, copies_for, randn, timed

NUM_Q_HEADS = 32
NUM_KV_HEADS = 8
PAGE = 64
WINDOW = 4096
NUM_ROWS = 256
CONTEXT = 8192
CHUNK = 8192
HEAD_DIMS = (128, 256)
KEY_TILE = 64
"""Keys that a tile of scores has at least."""


def first_seen(position: int, window: int) -> int:
    """First key that a position sees; window 0: all keys."""
    return max(0, position + 1 - window) if window else 0


def tile_flops(count: int, start: int, window: int, tile: int, head_dim: int) -> int:
    """Operations of the products of all partly visible tiles, of a chunk of `count` tokens after
    `start` others; tiles have `tile` tokens and `KEY_TILE` keys."""
    num_scores = 0
    for first in range(start, start + count, tile):
        end = min(first + tile, start + count)
        begin = first_seen(first, window) // KEY_TILE * KEY_TILE
        num_scores += tile * (-(-end // KEY_TILE) * KEY_TILE - begin)
    return 4 * num_scores * NUM_Q_HEADS * head_dim


def caches_of(num_pages: int, head_dim: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Random keys and values of as many layers as no cache of the GPU holds."""
    num_bytes = 4 * num_pages * NUM_KV_HEADS * PAGE * head_dim
    layout = KvLayout(copies_for(num_bytes), NUM_KV_HEADS, head_dim, torch.bfloat16)
    made = KvBlocks.allocated([layout], num_pages, PAGE, torch.device("cuda"))
    (layers,) = made.kv_caches
    for layer in layers:
        layer.copy_(randn(*layer.shape))
    return [(layer[0], layer[1]) for layer in layers]


def tables_of(lens: list[int], window: int) -> tuple[torch.Tensor, int]:
    """Block tables whose pages before the window are given back, and the number of all pages."""
    width = -(-max(lens) // PAGE)
    seen = [range(first_seen(n - 1, window) // PAGE, -(-n // PAGE)) for n in lens]
    num_pages = 1 + sum(map(len, seen))
    order = iter((torch.randperm(num_pages - 1) + 1).tolist())
    table = torch.zeros(len(lens), width, dtype=torch.int32)
    for row, blocks in enumerate(seen):
        table[row, blocks.start : blocks.stop] = torch.tensor([next(order) for _ in blocks])
    return table.cuda(), num_pages


def time_decode(head_dim: int, window: int, num_rows: int = NUM_ROWS) -> float:
    """Microseconds of a layer's attention with its merge."""
    lens = [CONTEXT + 7 * row % PAGE for row in range(num_rows)]
    table, num_pages = tables_of(lens, window)
    caches = caches_of(num_pages, head_dim)
    seq_lens = torch.tensor(lens, dtype=torch.int32, device="cuda")
    table_rows = torch.arange(num_rows, dtype=torch.int32, device="cuda")
    plan = DecodePlan.allocate(
        max_rows=num_rows,
        max_seq_len=max(lens),
        num_q_heads=NUM_Q_HEADS,
        num_kv_heads=NUM_KV_HEADS,
        head_dim=head_dim,
        device=torch.device("cuda"),
    ).without_folds()
    q = randn(num_rows, NUM_Q_HEADS, head_dim)
    out = torch.empty_like(q)
    plan_decode(plan, seq_lens, table_rows, table, PAGE, share=False, window=window)

    def layer(k: torch.Tensor, v: torch.Tensor) -> None:
        kernels = attention_kernels(q, k, window=window)
        kernels.attend_decodes(q, k, v, seq_lens, table_rows, table, plan, out, window=window)

    return timed([partial(layer, *each) for each in caches * 4][:8])


def time_prefill(head_dim: int, window: int, start: int) -> float:
    """Microseconds of a layer's attention of a chunk behind `start` tokens."""
    total = start + CHUNK
    # All pages are there: the first tokens of the chunk see a window before it.
    table, num_pages = tables_of([total], 0)
    (k, v), *_ = caches_of(num_pages, head_dim)
    q = randn(CHUNK, NUM_Q_HEADS, head_dim)
    bounds, seq_lens, rows = (
        torch.tensor(each, dtype=torch.int32, device="cuda") for each in ([0, CHUNK], [total], [0])
    )
    group = NUM_Q_HEADS // NUM_KV_HEADS
    tiles = prefill_tiles([CHUNK], [start], group, torch.device("cuda"))
    prefill = attention_kernels(q, k, window=window).prefill
    given = {"window": window} if window else {}
    out = torch.empty_like(q)
    call = partial(prefill, q, k, v, bounds, seq_lens, rows, table, tiles, out, **given)
    return timed([call] * 3, replays=7)


def window_attention() -> Iterator[Figure]:
    for head_dim in HEAD_DIMS:
        num_bytes = NUM_ROWS * WINDOW * NUM_KV_HEADS * head_dim * 4
        limit = num_bytes / BYTES_PER_US
        us = time_decode(head_dim, WINDOW)
        case = f"{NUM_ROWS} x {WINDOW} heads of {head_dim}"
        yield Figure("window decode", case, us, limit, f"{us / limit:.2f} x, aim 1.15")
    tile = tokens_per_tile(NUM_Q_HEADS // NUM_KV_HEADS, torch.device("cuda"))
    for head_dim in HEAD_DIMS:
        full_us = time_prefill(head_dim, 0, CONTEXT)
        rate = tile_flops(CHUNK, CONTEXT, 0, tile, head_dim) / full_us
        us = time_prefill(head_dim, WINDOW, CONTEXT)
        flops = tile_flops(CHUNK, CONTEXT, WINDOW, tile, head_dim)
        case = f"{CHUNK} on {CONTEXT} heads of {head_dim}"
        note = (
            f"{us / (flops / rate):.2f} x of the full kernel's rate, aim 1.15; full {full_us:.1f}"
        )
        yield Figure("window prefill", case, us, flops / FLOPS_PER_US, note)
