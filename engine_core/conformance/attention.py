"""Cases of attention over a paged cache: decodes, chunks of prompts, both together, blocks in
common, the last tokens of a batch, each over keys and values that the platform stored itself."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..layers.batch import ForwardBatch, last_tokens
from ..platforms import specification
from .case import ALLOWED, NUM_ITEMS, Case
from .subject import EPS, MAX_MODEL_LEN, Subject, rows_of

SHAPES = ((6, 2, 64), (5, 1, 128), (4, 4, 64))
"""Numbers of query heads and key heads, and head size."""
DECODE_LENS = tuple(1 + (37 * i) % 211 for i in range(NUM_ITEMS))
CHUNKS = tuple(((53 * i) % 97, 1 + (29 * i) % 67) for i in range(16))
"""Start and number of tokens of each chunk."""
NUM_SHARED = 2
"""Number of blocks that all sequences have in common where they share any."""
PIECE = 5
WINDOW = 37


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequences:
    """Sequences whose last tokens are computed, over caches that hold all of their keys and
    values."""

    starts: Sequence[int]
    counts: Sequence[int]
    q: Tensor
    """Queries [sum of counts, Hq, D] on the host."""
    tables: Tensor
    """int32 [sequences, blocks]"""
    cache: Tensor
    """Keys and values of the twin, [2, num_blocks, Hk, block_size, D]."""
    stored: Tensor
    """Keys and values of the platform, of the same shape; their layout is known to the platform
    alone."""

    def first(self, i: int) -> int:
        return sum(self.counts[:i])

    def batch(self, spans: Sequence[tuple[int, int, int]]) -> tuple[Tensor, ForwardBatch]:
        """Queries and batch of (sequence, first token, number of tokens)."""
        rows = [self.first(i) + at + j for i, at, count in spans for j in range(count)]
        positions = [self.starts[i] + at + j for i, at, count in spans for j in range(count)]
        items = [i for i, _, _ in spans]
        counts = np.array([count for _, _, count in spans], np.int32)
        block_size = self.cache.shape[3]
        owners = np.repeat(np.array(items), counts)
        where = torch.tensor(positions)
        slots = (
            self.tables[torch.from_numpy(owners), where // block_size].long() * block_size
            + where % block_size
        )
        starts = np.array([self.starts[i] + at for i, at, _ in spans], np.int32)
        num_blocks = int((starts + counts - 1).max()) // block_size + 1
        batch = ForwardBatch(
            token_ids=torch.zeros(len(rows), dtype=torch.int64),
            positions=where,
            slots=slots,
            starts=starts,
            counts=counts,
            block_tables=self.tables[items, :num_blocks],
            sampled=torch.from_numpy(counts).cumsum(0) - 1,
        )
        return self.q[rows], batch

    def whole(self, items: Sequence[int]) -> list[tuple[int, int, int]]:
        return [(i, 0, self.counts[i]) for i in items]


def attention_cases(subject: Subject) -> Iterator[Case]:
    ends = subject.flags.block_sizes[0], subject.flags.block_sizes[-1]
    for (heads, kv_heads, head_dim), block_size in zip(SHAPES, itertools.cycle(ends), strict=False):
        if head_dim <= subject.flags.max_head_dim:
            yield from _cases_of(subject, heads, kv_heads, head_dim, block_size, subject.dtype_name)
    if subject.flags.fp8_kv:
        yield from _cases_of(subject, *SHAPES[0], subject.flags.block_sizes[-1], "fp8")
    if subject.flags.windows:
        yield from _windowed(subject, *SHAPES[0], subject.flags.block_sizes[0])
    if subject.flags.sinks:
        yield from _with_sinks(subject, *SHAPES[0], subject.flags.block_sizes[0])
    yield _stored(subject, *SHAPES[0])


def _cases_of(
    subject: Subject, heads: int, kv_heads: int, head_dim: int, block_size: int, kv_format: str
) -> Iterator[Case]:
    platform = subject.platform(
        heads=heads, kv_heads=kv_heads, head_dim=head_dim, block_size=block_size
    )
    kind = "" if kv_format == subject.dtype_name else f"_{kv_format}"
    shapes = f"({heads}+2x{kv_heads})x{head_dim} block {block_size}"
    allowed = ALLOWED[kv_format]
    decodes = [length - 1 for length in DECODE_LENS], [1] * len(DECODE_LENS)
    chunks = [start for start, _ in CHUNKS], [count for _, count in CHUNKS]
    mixed = [*decodes[0][:8], *chunks[0][:8]], [*decodes[1][:8], *chunks[1][:8]]
    for name, (starts, counts), num_shared in (
        ("decode", decodes, 0),
        ("chunk", chunks, 0),
        ("mixed", mixed, 0),
        (
            "shared_prefix",
            ([length + NUM_SHARED * block_size - 1 for length in DECODE_LENS[:24]], [1] * 24),
            NUM_SHARED,
        ),
    ):
        sequences = _sequences(
            subject,
            platform,
            starts,
            counts,
            (heads, kv_heads, head_dim, block_size),
            kv_format,
            num_shared,
        )
        yield _case(
            platform, f"attention_{name}{kind}", f"{len(starts)} of {shapes}", sequences, allowed
        )
        if name == "chunk":
            yield _ends(
                platform, f"attention_ends{kind}", f"{len(starts)} of {shapes}", sequences, allowed
            )


def _windowed(
    subject: Subject, heads: int, kv_heads: int, head_dim: int, block_size: int
) -> Iterator[Case]:
    """Cases with a window, and with a scale of the model's own."""
    platform = subject.platform(
        heads=heads, kv_heads=kv_heads, head_dim=head_dim, block_size=block_size, window=WINDOW
    )
    lengths = [length - 1 for length in DECODE_LENS]
    shapes = f"({heads}+2x{kv_heads})x{head_dim} block {block_size} window {WINDOW}"
    for name, (starts, counts) in (
        ("decode", (lengths, [1] * len(lengths))),
        ("chunk", ([start for start, _ in CHUNKS], [count for _, count in CHUNKS])),
    ):
        own = _sequences(
            subject,
            platform,
            starts,
            counts,
            (heads, kv_heads, head_dim, block_size),
            subject.dtype_name,
        )
        operation = f"attention_{name}_window"
        own_shapes = f"{len(starts)} of {shapes}"
        yield _case(platform, operation, own_shapes, own, subject.allowed, scale=0.2, window=WINDOW)


def _with_sinks(
    subject: Subject, heads: int, kv_heads: int, head_dim: int, block_size: int
) -> Iterator[Case]:
    """Cases with sinks, from one with no weight to one that outweighs all keys."""
    platform = subject.platform(
        heads=heads, kv_heads=kv_heads, head_dim=head_dim, block_size=block_size
    )
    sinks = torch.linspace(-9, 30, heads)
    # At most as many sequences as a step of the examined platform may have.
    lengths = DECODE_LENS[len(CHUNKS) :]
    starts = [*(length - 1 for length in lengths), *(start for start, _ in CHUNKS)]
    counts = [*(1 for _ in lengths), *(count for _, count in CHUNKS)]
    own = _sequences(
        subject,
        platform,
        starts,
        counts,
        (heads, kv_heads, head_dim, block_size),
        subject.dtype_name,
    )
    shapes = f"{len(starts)} of ({heads}+2x{kv_heads})x{head_dim} block {block_size}"
    yield _case(platform, "attention_sinks", shapes, own, subject.allowed, sinks=sinks)


def _case(
    platform: Any,
    operation: str,
    shapes: str,
    sequences: Sequences,
    allowed: float,
    sinks: Tensor | None = None,
    **options: float,
) -> Case:
    """Case of an attention operation with these options and sinks (None: none)."""
    given = {} if sinks is None else {"sinks": sinks.to(platform.device)}

    def attend(spans: list[tuple[int, int, int]]) -> list[Tensor]:
        q, batch = sequences.batch(spans)
        batch = batch.to(platform.device)
        out = platform.attention(
            q.to(platform.device),
            sequences.stored,
            platform.plan_attention(batch),
            **given,
            **options,
        )
        return list(torch.split(out, batch.counts.tolist()))

    def in_pieces(items: list[int]) -> list[Tensor]:
        """Outputs of the same positions in pieces: a position's bits are the same decoded, in a
        chunk and in a whole prompt."""
        return [
            torch.cat(
                [attend([(i, at, min(PIECE, count - at))])[0] for at in range(0, count, PIECE)]
            )
            for i, count in ((i, sequences.counts[i]) for i in items)
        ]

    expected = specification.attention(
        sequences.q,
        sequences.cache,
        sequences.starts,
        sequences.counts,
        sequences.tables,
        sinks=sinks,
        **options,  # type: ignore[arg-type]  # a window is whole
    )
    return Case(
        operation=operation,
        shapes=shapes,
        run=lambda items: attend(sequences.whole(items)),
        expected=list(torch.split(expected, list(sequences.counts))),
        allowed=allowed,
        rearranged=in_pieces,
    )


def _ends(platform: Any, operation: str, shapes: str, sequences: Sequences, allowed: float) -> Case:
    """Case of the last token of each sequence, in a plan beside that of the whole batch."""

    def run(items: list[int]) -> list[Tensor]:
        q, batch = sequences.batch(sequences.whole(items))
        batch = batch.to(platform.device)
        platform.plan_attention(batch)
        own = last_tokens(batch, np.ones(len(items), np.int32))
        plan = platform.plan_attention(own, of_ends=True)
        return list(platform.attention(q.to(platform.device)[own.sampled], sequences.stored, plan))

    ends = [sequences.first(i) + count - 1 for i, count in enumerate(sequences.counts)]
    starts = [
        start + count - 1 for start, count in zip(sequences.starts, sequences.counts, strict=True)
    ]
    expected = specification.attention(
        sequences.q[ends], sequences.cache, starts, [1] * len(ends), sequences.tables
    )
    return Case(
        operation=operation, shapes=shapes, run=run, expected=list(expected), allowed=allowed
    )


def _sequences(
    subject: Subject,
    platform: Any,
    starts: Sequence[int],
    counts: Sequence[int],
    shape: tuple[int, int, int, int],
    kv_format: str,
    num_shared: int = 0,
) -> Sequences:
    """Random queries, keys and values; keys and values are not rotated, so that both caches hold
    the same numbers."""
    heads, kv_heads, head_dim, block_size = shape
    lengths = [start + count for start, count in zip(starts, counts, strict=True)]
    tables = tables_of(subject, lengths, block_size, num_shared)
    num_blocks = int(tables.max()) + 1
    kv_dtype = torch.float8_e4m3fn if kv_format == "fp8" else subject.dtype
    # Every slot of the blocks in use is written once: slots behind a sequence's end are never
    # weighed.
    slots = torch.arange(block_size, num_blocks * block_size)
    kv = subject.randn(len(slots), 2 * kv_heads, head_dim)
    cache = torch.zeros(2, num_blocks, kv_heads, block_size, head_dim, dtype=kv_dtype)
    # The middle one of three layers; a block holds the keys and values of all three.
    layers = torch.zeros(num_blocks, 3, *cache[:, 0].shape, dtype=kv_dtype, device=platform.device)
    stored = layers[:, 1].transpose(0, 1)
    specification.store_kv(kv[:, :kv_heads], kv[:, kv_heads:], slots, cache)
    cos_sin = torch.cat((torch.ones(1, head_dim // 2), torch.zeros(1, head_dim // 2)), dim=1)
    qkv = torch.cat(
        (torch.zeros(len(slots), heads, head_dim, dtype=subject.dtype), kv), dim=1
    ).flatten(1)
    _store(platform, qkv, torch.zeros_like(slots), slots, cos_sin, stored)
    q = subject.randn(sum(counts), heads, head_dim)
    # Larger queries at every third token make its attention weights peaked, those of the others
    # flat.
    q[1::3] *= 4
    return Sequences(starts=starts, counts=counts, q=q, tables=tables, cache=cache, stored=stored)


def tables_of(
    subject: Subject, lengths: Sequence[int], block_size: int, num_shared: int = 0
) -> Tensor:
    """Block ids in random order; block 0 belongs to no sequence."""
    num_blocks = [-(-length // block_size) for length in lengths]
    ids = subject.permutation(sum(num_blocks)).int() + 1
    tables = torch.zeros(len(lengths), max(num_blocks), dtype=torch.int32)
    first = 0
    for i, count in enumerate(num_blocks):
        tables[i, :count] = ids[first : first + count]
        tables[i, :num_shared] = tables[0, :num_shared]
        first += count
    return tables


def _store(
    platform: Any,
    qkv: Tensor,
    positions: Tensor,
    slots: Tensor,
    cos_sin: Tensor,
    cache: Tensor,
    **parts: Tensor,
) -> Tensor:
    """Stores keys and values, and returns the queries; `parts` are bias and norms."""
    count = len(slots)
    batch = ForwardBatch(
        token_ids=torch.zeros(count, dtype=torch.int64),
        positions=positions,
        slots=slots,
        starts=np.zeros(1, np.int32),
        counts=np.array([count], np.int32),
        block_tables=torch.zeros(1, 1, dtype=torch.int32),
        sampled=torch.zeros(0, dtype=torch.int64),
    ).to(platform.device)
    given = {"bias": None, "q_norm": None, "k_norm": None} | {
        k: v.to(platform.device) for k, v in parts.items()
    }
    x = qkv.to(platform.device)
    table = cos_sin.to(platform.device)
    q: Tensor = platform.qk_norm_rope_store_kv(x, batch, table, cache, **given, eps=EPS)
    return q


def _stored(subject: Subject, heads: int, kv_heads: int, head_dim: int) -> Case:
    """Case of keys with norm, bias and rotation, seen by attention: each sequence decodes its last
    token."""
    block_size = subject.flags.block_sizes[0]
    platform = subject.platform(
        heads=heads, kv_heads=kv_heads, head_dim=head_dim, block_size=block_size
    )
    lengths = DECODE_LENS[:16]
    tables = tables_of(subject, lengths, block_size, 0)
    owners = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    positions = torch.cat([torch.arange(length) for length in lengths])
    slots = tables[owners, positions // block_size].long() * block_size + positions % block_size
    width = (heads + 2 * kv_heads) * head_dim
    parts: dict[str, Any] = {
        "bias": subject.randn(width),
        "q_norm": subject.randn(head_dim),
        "k_norm": subject.randn(head_dim),
    }
    qkv = subject.randn(len(slots), width)
    angles = (
        torch.rand(MAX_MODEL_LEN, head_dim // 2, generator=torch.Generator().manual_seed(3)) * 7
    )
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
    cache = torch.zeros(
        2, int(tables.max()) + 1, kv_heads, block_size, head_dim, dtype=subject.dtype
    )
    q, k, v = specification.qk_norm_rope(qkv, positions, cos_sin, kv_heads, eps=EPS, **parts)
    specification.store_kv(k, v, slots, cache)
    last = torch.tensor(lengths).cumsum(0) - 1
    sequences = Sequences(
        starts=[length - 1 for length in lengths],
        counts=[1] * len(lengths),
        q=q[last].to(subject.dtype),
        tables=tables,
        cache=cache,
        stored=torch.zeros_like(cache).to(platform.device),
    )

    def run(items: list[int]) -> list[Tensor]:
        """Stores the tokens of sequences together, then computes attention of the last token of
        each."""
        rows = torch.cat([torch.nonzero(owners == i)[:, 0] for i in items])
        stored = torch.zeros_like(cache).to(platform.device)
        own = rows_of(qkv, rows.tolist(), platform)
        _store(platform, own, positions[rows], slots[rows], cos_sin, stored, **parts)
        queries, batch = sequences.batch(sequences.whole(items))
        plan = platform.plan_attention(batch.to(platform.device))
        return list(platform.attention(queries.to(platform.device), stored, plan))

    expected = specification.attention(
        sequences.q, cache, sequences.starts, sequences.counts, tables
    )
    shapes = f"{len(lengths)} of ({heads}+2x{kv_heads})x{head_dim}"
    return Case(
        operation="store_kv",
        shapes=shapes,
        run=run,
        expected=list(expected),
        allowed=2 * subject.allowed,
    )
