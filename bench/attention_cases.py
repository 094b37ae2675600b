"""Batches whose attention `attention_library` times, and our attention of them, with the plan of a
step for all of its layers.

Sizes are those of Qwen3-8B; blocks are shuffled, and there are caches of several layers, so that
none is found in the GPU's cache.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import accumulate

import torch

from headwater.engine_core.platforms.cuda_attention import attention_kernels
from headwater.kernels.attention.decode_plan import plan_decode
from headwater.kernels.attention.prefill_attention import prefill_tiles

from .attention_lengths import Sequences, prefill_flops
from .byte_layers import room_for_plan
from .gpu_timing import BYTES_PER_US, FLOPS_PER_US, captured, randn

HEADS = 32
KV_HEADS = 8
HEAD_DIM = 128
PAGE = 64

Attend = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Attention function: keys and values of a layer, [num_blocks, Hk, PAGE, D], to the rows [T, Hq,
D]."""


@dataclass(frozen=True, slots=True)
class Planned:
    attend: Attend
    plan: Callable[[], object] | None = None
    """Plans a step for all of its layers; called once before times are measured."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Batch of the last `counts[i]` tokens of sequence i, of `lens[i]` in all, over bf16 caches."""

    name: str
    counts: list[int]
    lens: list[int]
    q: torch.Tensor = field(repr=False)
    """[sum of counts, HEADS, HEAD_DIM]"""
    caches: list[tuple[torch.Tensor, torch.Tensor]] = field(repr=False)
    table: torch.Tensor = field(repr=False)
    """int32 [sequences, blocks of the longest]"""

    @classmethod
    def random(cls, name: str, counts: list[int], lens: list[int]) -> Batch:
        sequences = Sequences(lens)
        return cls(
            name,
            counts,
            lens,
            randn(sum(counts), HEADS, HEAD_DIM),
            sequences.caches(),
            sequences.tables(),
        )

    @property
    def decodes(self) -> bool:
        return max(self.counts) == 1

    @property
    def query_starts(self) -> list[int]:
        return list(accumulate(self.counts, initial=0))

    @property
    def limit_ms(self) -> float:
        """Milliseconds of its products at the ceiling of the matrix units, or of its keys and
        values at the memory's."""
        pairs = zip(self.counts, self.lens, strict=True)
        flops = sum(prefill_flops(count, length - count, HEADS) for count, length in pairs)
        num_bytes = sum(self.lens) * 2 * KV_HEADS * HEAD_DIM * 2
        return max(flops / FLOPS_PER_US, num_bytes / BYTES_PER_US) / 1e3

    def end_of_first(self, tokens: int) -> tuple[Batch, slice]:
        """The last `tokens` of the first sequence as a batch, with all tokens before them as its
        cached prefix; and their rows in this batch."""
        rows = slice(self.counts[0] - tokens, self.counts[0])
        part = replace(
            self, counts=[tokens], lens=self.lens[:1], q=self.q[rows], table=self.table[:1]
        )
        return part, rows


def ours(batch: Batch) -> Planned:
    return _our_decode(batch) if batch.decodes else _our_prefill(batch)


def ints(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def _our_prefill(batch: Batch) -> Planned:
    starts = [length - count for count, length in zip(batch.counts, batch.lens, strict=True)]
    out = torch.empty_like(batch.q)
    where = ints(batch.query_starts), ints(batch.lens), ints(list(range(len(starts)))), batch.table

    def plan() -> torch.Tensor:
        return prefill_tiles(batch.counts, starts, HEADS // KV_HEADS, batch.q.device)

    tiles = plan()

    def attend(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        attention_kernels(batch.q, k).prefill(batch.q, k, v, *where, tiles, out)
        return out

    return Planned(attend, plan)


def _our_decode(batch: Batch) -> Planned:
    lens = ints(batch.lens)
    rows = ints(list(range(len(batch.lens))))
    out = torch.empty_like(batch.q)
    plan = room_for_plan(len(batch.lens), max(batch.lens), HEADS, KV_HEADS)

    def make_plan() -> None:
        plan_decode(plan, lens, rows, batch.table, PAGE, share=False)

    def attend(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        # As in an engine, and as FlashInfer's: each kernel starts while the one before it ends.
        kernels = attention_kernels(batch.q, k)
        kernels.attend_decodes(batch.q, k, v, lens, rows, batch.table, plan, out, dependent=True)
        return out

    return Planned(attend, captured([make_plan]).replay)
