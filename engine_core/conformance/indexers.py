"""Cases of sparse indexers: what a token stores, and attention to the latents that they choose."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from headwater.kernels.attention.rotary_pairs import RotaryPairs
from headwater.kernels.latent.index_twin import (
    chosen_twin,
    index_scores_twin,
    store_index_keys_twin,
)
from headwater.kernels.latent.latent_twin import latent_attention_twin

from ..layers.platform import IndexedQueries
from ..weights.latent_config import IndexConfig
from .attention import Sequences, tables_of
from .case import NUM_ITEMS, Case
from .latents import HEADS, SCALE, SIZES, SPANS, batch_of
from .subject import EPS, Subject, rows_of

INDEX = IndexConfig(num_heads=16, head_dim=128, num_chosen=48, is_interleaved=False)
INDEXED = replace(SIZES, query_rank=64, index=INDEX)
MOST = 3
"""Bound of the whole numbers that are the indexer's inputs: scores are exact, and many are
equal."""


def indexer_cases(subject: Subject) -> Iterator[Case]:
    if not subject.flags.indexers:
        return
    block_size = subject.flags.block_sizes[0]
    width = INDEXED.cached_width
    platform = subject.platform(heads=HEADS, head_dim=width, block_size=block_size, latent=INDEXED)
    for is_interleaved in (True, False):
        yield _stored(subject, platform, block_size, is_interleaved=is_interleaved)
    yield _attended(subject, platform, block_size)


def _stored(subject: Subject, platform: Any, block_size: int, *, is_interleaved: bool) -> Case:
    pairs = RotaryPairs(SIZES.rotary_dim, is_interleaved)
    q = subject.randn(NUM_ITEMS, INDEX.num_heads, INDEX.head_dim)
    k = subject.randn(NUM_ITEMS, INDEX.head_dim)
    norm = subject.randn(INDEX.head_dim)
    bias = subject.randn(INDEX.head_dim)
    positions = subject.integers(500, NUM_ITEMS)
    slots = subject.permutation(NUM_ITEMS) + block_size
    cos_sin = torch.rand(500, SIZES.rotary_dim, generator=torch.Generator().manual_seed(4))
    shape = NUM_ITEMS // block_size + 2, block_size, INDEXED.cached_width

    def run(items: list[int]) -> list[Tensor]:
        cache = torch.zeros(shape, dtype=subject.dtype, device=platform.device)
        keys = cache[..., SIZES.width :]
        own = rows_of(q, items, platform)
        batch = batch_of(positions[items], slots[items]).to(platform.device)
        platform.store_index_keys(
            own,
            rows_of(k, items, platform),
            batch,
            cos_sin.to(platform.device),
            keys,
            norm=norm.to(platform.device),
            bias=bias.to(platform.device),
            eps=EPS,
            pairs=pairs,
        )
        stored = keys.flatten(0, 1)[batch.slots]
        return list(torch.cat((own.flatten(1), stored), 1).float())

    twin = torch.zeros(*shape[:2], INDEX.head_dim, dtype=torch.float64)
    given: dict[str, Any] = {
        "norm": norm.double(),
        "bias": bias.double(),
        "eps": EPS,
        "pairs": pairs,
    }
    rotated = store_index_keys_twin(
        q.double(), k.double(), positions, slots, cos_sin, twin, **given
    )
    expected = torch.cat((rotated.flatten(1), twin.flatten(0, 1)[slots]), 1)
    return Case(
        operation="store_index_keys" + ("" if is_interleaved else "_halves"),
        shapes=f"{NUM_ITEMS}x{INDEX.num_heads}x{INDEX.head_dim} block {block_size}",
        run=run,
        expected=list(expected.float()),
        allowed=subject.allowed,
    )


def _attended(subject: Subject, platform: Any, block_size: int) -> Case:
    starts, counts = zip(*SPANS, strict=True)
    lengths = [start + count for start, count in SPANS]
    tables = tables_of(subject, lengths, block_size)
    num_blocks = int(tables.max()) + 1
    latents = subject.randn(num_blocks, block_size, SIZES.width)
    keys = _whole_numbers(subject, num_blocks, block_size, INDEX.head_dim)
    stored = torch.cat((latents, keys), 2).to(platform.device)
    raised = HEADS, SIZES.raised_dim, SIZES.kv_rank
    kv_b = subject.randn(*raised, scale=SIZES.kv_rank**-0.5)
    attention = platform.indexed_attention(kv_b.to(platform.device), SCALE, INDEX.num_chosen)
    num_tokens = sum(counts)
    queries = IndexedQueries(
        subject.randn(num_tokens, HEADS, SIZES.query_dim),
        _whole_numbers(subject, num_tokens, INDEX.num_heads, INDEX.head_dim),
        _whole_numbers(subject, num_tokens, INDEX.num_heads).float(),
    )
    sequences = Sequences(
        starts=starts,
        counts=counts,
        # Indices of tokens stand for their queries.
        q=torch.arange(num_tokens),
        tables=tables,
        cache=latents[None, :, None],
        stored=stored,
    )

    def run(items: list[int]) -> list[Tensor]:
        tokens, batch = sequences.batch(sequences.whole(items))
        batch = batch.to(platform.device)
        own = IndexedQueries(*(each[tokens].to(platform.device) for each in queries))
        out = attention(own, stored, platform.plan_attention(batch))
        return list(torch.split(out, batch.counts.tolist()))

    token = 0
    expected = []
    for table, count, length in zip(tables.long(), counts, lengths, strict=True):
        rows = []
        for seen in range(length - count + 1, length + 1):
            own = slice(token, token + 1)
            scored = queries.index_heads[own].double(), queries.head_weights[own]
            scores = index_scores_twin(*scored, keys[table].flatten(0, 1)[:seen].double())[0]
            chosen = chosen_twin(scores, INDEX.num_chosen)
            rows.append(
                latent_attention_twin(
                    queries.heads[own].double(),
                    kv_b.double(),
                    latents[table].flatten(0, 1)[chosen][None].double(),
                    torch.zeros(1, dtype=torch.int64),
                    len(chosen),
                    rotary=SIZES.rotary_dim,
                    scale=SCALE,
                ).flatten(1)
            )
            token += 1
        expected.append(torch.cat(rows).float())
    return Case(
        operation="indexed_attention",
        shapes=f"{INDEX.num_chosen} of {len(counts)} of {HEADS}x{SIZES.width} block {block_size}",
        run=run,
        expected=expected,
        allowed=subject.allowed,
    )


def _whole_numbers(subject: Subject, *shape: int) -> Tensor:
    return (subject.integers(2 * MOST - 1, *shape) - (MOST - 1)).to(subject.dtype)
