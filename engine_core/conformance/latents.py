"""Cases of attention over latents: what a token stores, and prompts and decodes over a paged cache
that the platform stored itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headwater.kernels.attention.rotary_pairs import RotaryPairs
from headwater.kernels.latent.latent_twin import latent_attention_twin, store_latents_twin

from ..layers.batch import ForwardBatch
from ..weights.latent_config import LatentConfig
from .attention import PIECE, Sequences, tables_of
from .case import NUM_ITEMS, Case
from .subject import EPS, Subject, rows_of

SIZES = LatentConfig(kv_rank=512, rotary_dim=64, plain_dim=128, value_dim=128)
"""DeepSeek's sizes."""
HEADS = 16
SPANS = (*((length - 1, 1) for length in (1, 17, 64, 300)), (0, 67), (53, 40), (9, 3))
"""Start and number of tokens of each sequence."""
SCALE = SIZES.query_dim**-0.5


def latent_cases(subject: Subject) -> Iterator[Case]:
    if not subject.flags.latents:
        return
    for block_size in {subject.flags.block_sizes[0], subject.flags.block_sizes[-1]}:
        platform = subject.platform(
            heads=HEADS, head_dim=SIZES.width, block_size=block_size, latent=SIZES
        )
        for is_interleaved in (True, False):
            yield _stored(subject, platform, block_size, is_interleaved=is_interleaved)
        yield _attended(subject, platform, block_size)


def _stored(subject: Subject, platform: Any, block_size: int, *, is_interleaved: bool) -> Case:
    """Products of each query with the latent that is stored for its token: platforms may order a
    latent's numbers differently."""
    pairs = RotaryPairs(SIZES.rotary_dim, is_interleaved)
    q = subject.randn(NUM_ITEMS, HEADS, SIZES.query_dim)
    kv = subject.randn(NUM_ITEMS, SIZES.width)
    norm = subject.randn(SIZES.kv_rank)
    positions = subject.integers(500, NUM_ITEMS)
    slots = subject.permutation(NUM_ITEMS) + block_size
    cos_sin = torch.rand(500, SIZES.rotary_dim, generator=torch.Generator().manual_seed(4))
    shape = NUM_ITEMS // block_size + 2, block_size, SIZES.width
    given: dict[str, Any] = {"eps": EPS, "pairs": pairs}

    def run(items: list[int]) -> list[Tensor]:
        cache = torch.zeros(shape, dtype=subject.dtype, device=platform.device)
        own = rows_of(q, items, platform)
        batch = batch_of(positions[items], slots[items]).to(platform.device)
        platform.store_latents(
            own,
            rows_of(kv, items, platform),
            batch,
            cos_sin.to(platform.device),
            cache,
            norm=norm.to(platform.device),
            **given,
        )
        return _shown(own, cache.flatten(0, 1)[batch.slots])

    twin = torch.zeros(shape, dtype=torch.float64)
    rotated = store_latents_twin(
        q.double(), kv.double(), positions, slots, cos_sin, twin, norm=norm.double(), **given
    )
    return Case(
        operation="store_latents" + ("" if is_interleaved else "_halves"),
        shapes=f"{NUM_ITEMS}x{HEADS}x{SIZES.query_dim} block {block_size}",
        run=run,
        expected=_shown(rotated, twin.flatten(0, 1)[slots]),
        allowed=subject.allowed,
    )


def _shown(q: Tensor, latents: Tensor) -> list[Tensor]:
    """Results by token: numbers of its queries without a position, the first numbers of its latent,
    and the products of the rotated numbers of both."""
    plain = q[..., : SIZES.plain_dim].flatten(1)
    ends, key = q[..., SIZES.plain_dim :], latents[:, SIZES.kv_rank :]
    met = (ends.double() * key.double()[:, None]).sum(2)
    return list(torch.cat((plain.double(), latents[:, : SIZES.kv_rank].double(), met), 1).float())


def batch_of(positions: Tensor, slots: Tensor) -> ForwardBatch:
    """Tokens of one request, as the operation that stores latents reads them."""
    count = len(slots)
    return ForwardBatch(
        token_ids=torch.zeros(count, dtype=torch.int64),
        positions=positions,
        slots=slots,
        starts=np.zeros(1, np.int32),
        counts=np.array([count], np.int32),
        block_tables=torch.zeros(1, 1, dtype=torch.int32),
        sampled=torch.zeros(0, dtype=torch.int64),
    )


def _attended(subject: Subject, platform: Any, block_size: int) -> Case:
    starts, counts = zip(*SPANS, strict=True)
    lengths = [start + count for start, count in SPANS]
    tables = tables_of(subject, lengths, block_size)
    num_blocks = int(tables.max()) + 1
    latents = subject.randn(num_blocks, block_size, SIZES.width)
    # The middle one of three layers; a page holds the latents of all three.
    pages = latents.to(platform.device)[:, None].repeat(1, 3, 1, 1)
    stored = pages[:, 1]
    raised = HEADS, SIZES.raised_dim, SIZES.kv_rank
    kv_b = subject.randn(*raised, scale=SIZES.kv_rank**-0.5)
    attention = platform.latent_attention(kv_b.to(platform.device), SCALE)
    q = subject.randn(sum(counts), HEADS, SIZES.query_dim)
    sequences = Sequences(
        starts=starts,
        counts=counts,
        q=q,
        tables=tables,
        cache=latents[None, :, None],
        stored=stored,
    )

    def attend(spans: list[tuple[int, int, int]]) -> list[Tensor]:
        own, batch = sequences.batch(spans)
        batch = batch.to(platform.device)
        plan = platform.plan_attention(batch)
        out = attention(own.to(platform.device), stored, plan)
        return list(torch.split(out, batch.counts.tolist()))

    def in_pieces(items: list[int]) -> list[Tensor]:
        """Outputs of the same positions in pieces; see `attention_cases`."""
        return [
            torch.cat(
                [
                    attend([(i, at, min(PIECE, counts[i] - at))])[0]
                    for at in range(0, counts[i], PIECE)
                ]
            )
            for i in items
        ]

    expected = [
        latent_attention_twin(
            own.double(),
            kv_b.double(),
            latents,
            table,
            length,
            rotary=SIZES.rotary_dim,
            scale=SCALE,
        ).flatten(1)
        for own, table, length in zip(torch.split(q, list(counts)), tables, lengths, strict=True)
    ]
    return Case(
        operation="latent_attention",
        shapes=f"{len(counts)} of {HEADS}x{SIZES.width} block {block_size}",
        run=lambda items: attend(sequences.whole(items)),
        expected=expected,
        allowed=subject.allowed,
        rearranged=in_pieces,
    )
