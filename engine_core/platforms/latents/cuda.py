"""Operations of latent attention on an NVIDIA GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from headwater.kernels.attention import hopper_attention
from headwater.kernels.attention.reduce_splits import reduce_splits
from headwater.kernels.attention.rotary_pairs import RotaryPairs
from headwater.kernels.latent import hopper_latent_attention as hopper
from headwater.kernels.latent.choose_positions import choose_positions
from headwater.kernels.latent.gather_latents import gather_latents, list_tokens
from headwater.kernels.latent.head_products import absorbed_queries, head_values
from headwater.kernels.latent.index_scores import index_scores
from headwater.kernels.latent.latent_attention import latent_decode, latent_prefill
from headwater.kernels.latent.latent_plan import LatentPlan
from headwater.kernels.latent.latent_tiles import KEYS
from headwater.kernels.latent.store_index_keys import store_index_keys
from headwater.kernels.latent.store_latents import store_latents

from ...layers.batch import ForwardBatch
from ...layers.platform import IndexedQueries
from ..cuda_attention_plans import AttentionPlan, AttentionPlans
from .cuda_plans import BLOCK, MOST_TOKENS, ChosenWorkspace, LatentPlans, LatentRows


@dataclass(frozen=True, slots=True)
class LatentKernels:
    """Launchers for queries and latents of one kind; all kinds give the same bits. Arguments are
    those of `latent_decode` and `latent_prefill`."""

    decode: Callable[..., None]
    prefill: Callable[..., None]


ANY_GPU = LatentKernels(latent_decode, latent_prefill)
HOPPER = LatentKernels(hopper.hopper_latent_decode, hopper.hopper_latent_prefill)


def latent_kernels(q: torch.Tensor, cache: torch.Tensor, rank: int) -> LatentKernels:
    """Kernels for absorbed queries [E, Hq, width] over latents [num_blocks, block_size, width]."""
    is_served = (
        q.dtype == cache.dtype == torch.bfloat16
        and (rank, q.shape[2] - rank) == (hopper.RANK, hopper.ROTARY)
        and cache.shape[1] % KEYS == 0
        and hopper_attention.is_hopper(q.device)
        and cache[0].is_contiguous()
        and cache.stride(0) % cache.shape[2] == 0
    )
    return HOPPER if is_served else ANY_GPU


class CudaLatents:
    """See `IndexPlatform`."""

    plans: AttentionPlans

    def store_latents(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        batch: ForwardBatch,
        cos_sin: torch.Tensor,
        cache: torch.Tensor,
        *,
        norm: torch.Tensor,
        eps: float,
        pairs: RotaryPairs,
    ) -> None:
        where = batch.positions, batch.slots, cos_sin, cache
        store_latents(q, kv, *where, norm=norm, eps=eps, pairs=pairs)

    def latent_attention(self, kv_b: torch.Tensor, scale: float) -> CudaLatentAttention:
        assert isinstance(self.plans, LatentPlans)
        return CudaLatentAttention(kv_b, scale, self.plans.totals)

    def store_index_keys(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        batch: ForwardBatch,
        cos_sin: torch.Tensor,
        keys: torch.Tensor,
        *,
        norm: torch.Tensor,
        bias: torch.Tensor,
        eps: float,
        pairs: RotaryPairs,
    ) -> None:
        where = batch.positions, batch.slots, cos_sin, keys
        store_index_keys(q, k, *where, norm=norm, bias=bias, eps=eps, pairs=pairs)

    def indexed_attention(
        self, kv_b: torch.Tensor, scale: float, num_chosen: int
    ) -> CudaIndexedAttention:
        assert isinstance(self.plans, LatentPlans)
        assert self.plans.chosen is not None
        over_all = self.latent_attention(kv_b, scale)
        return CudaIndexedAttention(over_all, self.plans.chosen, num_chosen)


class CudaLatentAttention:
    """See `HeadsOverLatents`."""

    def __init__(self, kv_b: torch.Tensor, scale: float, totals: torch.Tensor) -> None:
        """`totals` of `room_for_totals`."""
        self._kv_b = kv_b
        self._scale = scale
        self._totals = totals

    def __call__(
        self, q: torch.Tensor, cache: torch.Tensor, attention_plan: AttentionPlan
    ) -> torch.Tensor:
        plan = attention_plan
        n = plan.num_decodes
        rank = self._kv_b.shape[2]
        absorbed = absorbed_queries(q, self._kv_b, cache.shape[2])
        attended = absorbed.new_empty(*q.shape[:2], rank)
        if n:
            assert isinstance(plan.decode, LatentPlan)
            rows = LatentRows(plan.seq_lens, plan.table_rows, plan.block_tables, plan.decode)
            self._decode(absorbed[:n], cache, rows, attended[:n])
        kernels = latent_kernels(absorbed, cache, rank)
        if len(plan.tiles):
            kernels.prefill(
                absorbed,
                cache,
                plan.query_starts,
                plan.chunk_lens,
                plan.chunk_rows,
                plan.block_tables,
                plan.tiles,
                self._totals,
                attended,
                scale=self._scale,
            )
        return self._values(q, cache, attended)

    def of_rows(self, q: torch.Tensor, cache: torch.Tensor, rows: LatentRows) -> torch.Tensor:
        """The same for tokens each of which is a row that decodes."""
        absorbed = absorbed_queries(q, self._kv_b, cache.shape[2])
        attended = absorbed.new_empty(*q.shape[:2], self._kv_b.shape[2])
        self._decode(absorbed, cache, rows, attended)
        return self._values(q, cache, attended)

    def _decode(
        self, absorbed: torch.Tensor, cache: torch.Tensor, rows: LatentRows, out: torch.Tensor
    ) -> None:
        kernels = latent_kernels(absorbed, cache, out.shape[2])
        kernels.decode(absorbed, cache, *rows, out, scale=self._scale)
        reduce_splits(rows.seq_lens, rows.plan, out)

    def _values(self, q: torch.Tensor, cache: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        _, raised, rank = self._kv_b.shape
        plain = q.shape[2] - (cache.shape[2] - rank)
        return head_values(attended, self._kv_b, raised - plain)


class CudaIndexedAttention:
    """See `HeadsOverChosen`. Tokens are taken some at a time: their chosen latents are copied, and
    each token is a row that decodes over its copies."""

    def __init__(
        self, attention: CudaLatentAttention, workspace: ChosenWorkspace, num_chosen: int
    ) -> None:
        self._attention = attention
        self._workspace = workspace
        self._num_chosen = num_chosen

    def __call__(
        self, queries: IndexedQueries, cache: torch.Tensor, attention_plan: AttentionPlan
    ) -> torch.Tensor:
        plan = attention_plan
        num_tokens = len(queries.heads)
        tokens = queries.heads.new_empty(3, num_tokens, dtype=torch.int32)
        list_tokens(
            plan.seq_lens,
            plan.table_rows,
            plan.query_starts,
            plan.chunk_lens,
            plan.chunk_rows,
            self._num_chosen,
            tokens,
        )
        found = [
            self.of_tokens(
                IndexedQueries(*(each[first : first + MOST_TOKENS] for each in queries)),
                cache,
                tokens[:, first : first + MOST_TOKENS],
                plan.block_tables,
            )
            for first in range(0, num_tokens, MOST_TOKENS)
        ]
        return found[0] if len(found) == 1 else torch.cat(found)

    def of_tokens(
        self,
        queries: IndexedQueries,
        cache: torch.Tensor,
        tokens: torch.Tensor,
        block_tables: torch.Tensor,
    ) -> torch.Tensor:
        """At most `MOST_TOKENS` queries; tokens int32 [3, N] as `list_tokens` makes them."""
        num_tokens = len(queries.heads)
        width = cache.shape[2] - queries.index_heads.shape[2]
        seq_lens, table_rows, num_chosen = tokens
        scores = cache.new_empty(
            num_tokens, block_tables.shape[1] * cache.shape[1], dtype=torch.float32
        )
        chosen = tokens.new_empty(num_tokens, self._workspace.room)
        gathered = queries.heads.new_empty(num_tokens, self._workspace.room, width)
        where = seq_lens, table_rows, block_tables
        index_scores(
            queries.index_heads,
            queries.head_weights,
            cache[..., width:],
            *where,
            scores,
            self._num_chosen,
        )
        choose_positions(scores, seq_lens, chosen, self._num_chosen)
        latents = cache[..., :width]
        gather_latents(latents, chosen, num_chosen, table_rows, block_tables, gathered)
        rows = self._workspace.rows(num_chosen)
        return self._attention.of_rows(queries.heads, gathered.view(-1, BLOCK, width), rows)
