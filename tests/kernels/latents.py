"""Random paged latents, and attention over them by any of its kernels."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from itertools import accumulate

import torch

from headwater.kernels.attention.decode_attention import attention_of_rows
from headwater.kernels.attention.reduce_splits import reduce_splits
from headwater.kernels.latent import hopper_latent_attention, latent_attention
from headwater.kernels.latent.latent_attention import list_row_tiles, room_for_totals
from headwater.kernels.latent.latent_plan import LatentPlan, plan_latents
from headwater.kernels.launch.device import upload
from tests.kernels.paging import POISON, PagedBatch

SCALE = 0.05


@dataclass(frozen=True)
class LatentBatch:
    """Sequences whose latents [num_blocks, block_size, rank + rotary] lie in shuffled blocks."""

    pages: PagedBatch
    rank: int

    @classmethod
    def random(
        cls,
        seq_lens: list[int],
        num_heads: int,
        rank: int,
        rotary: int,
        block_size: int,
        generator: torch.Generator,
        dtype: torch.dtype = torch.bfloat16,
    ) -> LatentBatch:
        pages = PagedBatch(
            seq_lens, num_heads, 1, rank + rotary, block_size, generator, dtype=dtype
        )
        return cls(pages, rank)

    def in_dtype(self, dtype: torch.dtype) -> LatentBatch:
        """The same sequences, their latents rounded to this dtype."""
        pages = copy(self.pages)
        pages.k_cache = pages.k_cache.to(dtype)
        return LatentBatch(pages, self.rank)

    @property
    def cache(self) -> torch.Tensor:
        return self.pages.k_cache[:, 0]

    def queries(self, num_tokens: int) -> torch.Tensor:
        return self.pages.queries(num_tokens)

    def ints(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.cache.device)

    def twin(self, q: torch.Tensor, i: int, seq_len: int) -> torch.Tensor:
        """Attention of q [C, Hq, width], the last tokens of sequence i, in float64."""
        keys = self.pages.k_cache.double()
        table = self.pages.block_tables[int(self.pages.table_rows[i])]
        values = keys[..., : self.rank]
        return attention_of_rows(q.double(), keys, values, table, seq_len, scale=SCALE)

    def decode(
        self,
        q: torch.Tensor,
        rows: list[int] | None = None,
        *,
        hopper: bool = False,
        num_ranges: int | None = None,
        max_partials: int | None = None,
    ) -> torch.Tensor:
        """Attention of the last token of these sequences, by default all, into poisoned memory;
        with splits divided into so many ranges and room for so many partial results, by default
        as the plan says."""
        chosen = self.ints(list(range(len(self.pages.seq_lens))) if rows is None else rows).long()
        seq_lens = self.pages.lengths()[chosen]
        plan = LatentPlan.allocate(
            max_rows=len(chosen),
            max_seq_len=max(self.pages.seq_lens),
            num_heads=q.shape[1],
            rank=self.rank,
            device=q.device,
            num_ranges=num_ranges,
            max_partials=max_partials,
        )
        plan.partial_acc.fill_(POISON)
        plan.partial_ml.fill_(POISON)
        plan_latents(plan, seq_lens)
        q = q[chosen].contiguous()
        out = torch.full_like(q[..., : self.rank], POISON).contiguous()
        where = (seq_lens, self.pages.table_rows[chosen], self.pages.block_tables)
        launch = (
            hopper_latent_attention.hopper_latent_decode
            if hopper
            else latent_attention.latent_decode
        )
        launch(q, self.cache, *where, plan, out, scale=SCALE)
        reduce_splits(seq_lens, plan, out)
        return out

    def prefill(
        self,
        q: torch.Tensor,
        counts: list[int],
        seq_lens: list[int] | None = None,
        *,
        hopper: bool = False,
    ) -> torch.Tensor:
        """Attention of the last `counts` tokens of each sequence, whose lengths may be cut."""
        lengths = self.pages.seq_lens if seq_lens is None else seq_lens
        starts = [length - count for length, count in zip(lengths, counts, strict=True)]
        tiles = upload(list_row_tiles(counts, starts, q.shape[1]), q.device)
        totals = room_for_totals(self.rank, q.device).fill_(POISON)
        out = torch.full_like(q[..., : self.rank], POISON).contiguous()
        launch = (
            hopper_latent_attention.hopper_latent_prefill
            if hopper
            else latent_attention.latent_prefill
        )
        launch(
            q,
            self.cache,
            self.ints(list(accumulate(counts, initial=0))),
            self.ints(lengths),
            self.pages.table_rows,
            self.pages.block_tables,
            tiles,
            totals,
            out,
            scale=SCALE,
        )
        return out
