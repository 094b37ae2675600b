"""Paged attention in plain torch for CPUs: fixed splits of keys, each a matrix product of one shape, merged in order.

Decode rows and prompt rows go through the same products over the same 256 keys, and a masked key weighs exactly zero,
so a position's result has the same bits whether it was decoded, part of a chunk, or recomputed beside others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

SPLIT = 256
"""Keys a split."""
QUERY_TILE = 128
"""Prompt positions that are computed at once; bounds memory."""
MIN_ROWS = 8
"""float32 products of fewer rows are summed in another order than those of more (see `row_stable_linear`)."""
LANES = 16
"""Transcendentals may treat the rest of a vector register otherwise than a whole one; tensors end on whole ones."""
HIDDEN = -1e30
"""Added to the score of a hidden key. Finite, so that a split of nothing but hidden keys stays a number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """Successive positions of one request."""

    tokens: slice
    """Rows of the query."""
    blocks: torch.Tensor
    """int64 [splits, blocks a split]"""
    bias: torch.Tensor
    """float32 [splits, 1, tokens, SPLIT]: `HIDDEN` for keys after the position, else 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitPlan:
    """Which keys each query row attends to, made once a step for all layers."""

    decode_tokens: torch.Tensor
    """int64 [R] rows of the query that come alone."""
    items: torch.Tensor
    """int64 [I] row of `decode_tokens` of each split, in order."""
    item_splits: torch.Tensor
    """int64 [I] which split of its request."""
    num_splits: int
    """The most of any decode row."""
    item_blocks: torch.Tensor
    """int64 [I, blocks a split]"""
    item_bias: torch.Tensor
    """float32 [I, 1, 1, SPLIT]: `HIDDEN` for keys after the position, else 0."""
    tiles: list[Tile]


def plan_splits(starts: Sequence[int], counts: Sequence[int], block_tables: torch.Tensor, block_size: int) -> SplitPlan:
    """Row i computes positions starts[i] … starts[i] + counts[i] − 1; its blocks are block_tables[i], int [R, blocks].

    Entries of the table beyond a request's blocks must name some block (0 does).
    """
    per_split = SPLIT // block_size
    tables = _whole_splits(block_tables, per_split)
    decode_tokens: list[int] = []
    items: list[int] = []
    item_splits: list[int] = []
    ends: list[tuple[int, int]] = []
    tiles: list[Tile] = []
    first = 0
    for i, (start, count) in enumerate(zip(starts, counts, strict=True)):
        if count == 1:
            num_splits = start // SPLIT + 1
            items += [len(decode_tokens)] * num_splits
            item_splits += range(num_splits)
            ends += [(i, start)] * num_splits
            decode_tokens.append(first)
        else:
            tiles += _tiles(first, start, count, tables[i])
        first += count
    splits = torch.tensor(item_splits, dtype=torch.int64)
    rows = torch.tensor([row for row, _ in ends], dtype=torch.int64)
    positions = torch.tensor([position for _, position in ends], dtype=torch.int64)
    return SplitPlan(
        decode_tokens=torch.tensor(decode_tokens, dtype=torch.int64),
        items=torch.tensor(items, dtype=torch.int64),
        item_splits=splits,
        num_splits=max(item_splits, default=-1) + 1,
        item_blocks=tables[rows, splits] if ends else tables[:0, 0],
        item_bias=_bias(_keys(splits) > positions[:, None])[:, None, None],
        tiles=tiles,
    )


def split_attention(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, plan: SplitPlan, scale: float
) -> torch.Tensor:
    """q [T, Hq, D], caches [num_blocks, Hk, block_size, D]; returns [T, Hq, D] in q's dtype."""
    num_kv_heads = k_cache.shape[1]
    # [T, Hk, G, D]: the query heads that share a key head are rows of one product.
    grouped = q.view(q.shape[0], num_kv_heads, -1, q.shape[2])
    if not plan.tiles and plan.num_splits == 1:
        return _attend(grouped, plan.item_blocks, plan.item_bias, k_cache, v_cache, scale)[2].flatten(1, 2).to(q.dtype)
    out = torch.empty_like(q)
    if len(plan.decode_tokens):
        rows = grouped[plan.decode_tokens[plan.items]]
        state = _attend(rows, plan.item_blocks, plan.item_bias, k_cache, v_cache, scale)
        out[plan.decode_tokens] = _merge_items(state, plan).flatten(1, 2).to(q.dtype)
    for tile in plan.tiles:
        num_tokens, group = tile.tokens.stop - tile.tokens.start, grouped.shape[2]
        rows = grouped[tile.tokens].transpose(0, 1).flatten(1, 2)
        rows = rows.expand(len(tile.blocks), *rows.shape)
        bias = tile.bias.repeat_interleave(group, dim=2)
        state = _attend(rows, tile.blocks, bias, k_cache, v_cache, scale)
        merged = _merge([tuple(part[i] for part in state) for i in range(len(tile.blocks))])
        merged = merged.view(num_kv_heads, num_tokens, group, -1).transpose(0, 1)
        out[tile.tokens] = merged.flatten(1, 2).to(q.dtype)
    return out


State = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Of a split: its highest score [..., LANES] (equal lanes), the sum of exp(score − highest) [..., 1], and the values
weighted by the softmax over the split [..., D]."""


def _attend(
    rows: torch.Tensor,
    blocks: torch.Tensor,
    bias: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    scale: float,
) -> State:
    """rows [I, Hk, M, D] against the keys of blocks [I, blocks a split]; bias [I, 1, 1 or M, SPLIT]."""
    num_rows = rows.shape[2]
    if rows.dtype == torch.float32 and num_rows < MIN_ROWS:
        rows = torch.nn.functional.pad(rows, (0, 0, 0, MIN_ROWS - num_rows))
    scores = rows @ _gather(k_cache, blocks).transpose(-1, -2)
    scores = scores[:, :, :num_rows].float().mul_(scale).add_(bias)
    highest = scores.amax(-1, keepdim=True)
    # One fused pass; the sum comes back from it, since the highest score's weight is 1 / sum.
    weights = scores.softmax(-1)
    total = weights.amax(-1, keepdim=True).reciprocal_()
    weights = weights.to(rows.dtype)
    if num_rows < rows.shape[2]:
        weights = torch.nn.functional.pad(weights, (0, 0, 0, rows.shape[2] - num_rows))
    values = (weights @ _gather(v_cache, blocks))[:, :, :num_rows].float()
    return highest.expand(*highest.shape[:-1], LANES), total, values


def _gather(cache: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """[I, Hk, SPLIT, D] of the blocks [I, blocks a split]."""
    tiles = cache.index_select(0, blocks.flatten())
    return tiles.view(*blocks.shape, *cache.shape[1:]).transpose(1, 2).flatten(2, 3)


def _merge_items(state: State, plan: SplitPlan) -> torch.Tensor:
    """Splits of decode rows to rows, [R, Hk, G, D]; rows with fewer splits than others get ones that weigh nothing."""
    padded = []
    for part, empty in zip(state, (HIDDEN, 0.0, 0.0), strict=True):
        whole = part.new_full((plan.num_splits, len(plan.decode_tokens), *part.shape[1:]), empty)
        whole[plan.item_splits, plan.items] = part
        padded.append(whole)
    return _merge([tuple(part[i] for part in padded) for i in range(plan.num_splits)])


def _merge(splits: Sequence[tuple[torch.Tensor, ...]]) -> torch.Tensor:
    """One split after another, each product and sum rounded by itself; a split that weighs nothing changes nothing,
    and one that weighs everything is taken as it is."""
    if len(splits) == 1:
        return splits[0][2]
    highest = splits[0][0]
    for split in splits[1:]:
        highest = torch.maximum(highest, split[0])
    masses = [weight_sum * (m - highest).exp()[..., :1] for m, weight_sum, _ in splits]
    total = masses[0]
    for mass in masses[1:]:
        total = total + mass
    values = torch.zeros_like(splits[0][2])
    for mass, (_, _, weighted) in zip(masses, splits, strict=True):
        values += weighted * (mass / total)
    return values


def _tiles(first: int, start: int, count: int, table: torch.Tensor) -> list[Tile]:
    """`table` is one request's, [splits, blocks a split]; the first position is row `first` of the query."""
    tiles = []
    for offset in range(0, count, QUERY_TILE):
        num_tokens = min(QUERY_TILE, count - offset)
        positions = start + offset + torch.arange(num_tokens)
        num_splits = (start + offset + num_tokens - 1) // SPLIT + 1
        keys = _keys(torch.arange(num_splits))
        tokens = slice(first + offset, first + offset + num_tokens)
        bias = _bias(keys[:, None, None, :] > positions[:, None])
        tiles.append(Tile(tokens=tokens, blocks=table[:num_splits], bias=bias))
    return tiles


def _bias(hidden: torch.Tensor) -> torch.Tensor:
    return torch.zeros(hidden.shape).masked_fill_(hidden, HIDDEN)


def _keys(splits: torch.Tensor) -> torch.Tensor:
    """Positions of the keys of each split, [I, SPLIT]."""
    return splits[:, None] * SPLIT + torch.arange(SPLIT)


def _whole_splits(block_tables: torch.Tensor, per_split: int) -> torch.Tensor:
    """int64 [R, splits, blocks a split], filled up with block 0."""
    filled = torch.nn.functional.pad(block_tables, (0, -block_tables.shape[1] % per_split))
    return filled.view(len(filled), -1, per_split).long()
