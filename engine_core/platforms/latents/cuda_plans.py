"""Plans of attention over latents on an NVIDIA GPU: those of `AttentionPlans`, with the division of
splits and of prompts' rows that its kernels walk."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from headwater.kernels.attention.online_softmax import SPLIT
from headwater.kernels.latent.latent_attention import list_row_tiles, room_for_totals
from headwater.kernels.latent.latent_plan import ROWS, LatentPlan, plan_latents

from ...executor import Int32Array
from ...weights.model_config import ModelConfig
from ..cuda_attention_plans import AttentionPlan, AttentionPlans

MOST_PARTIAL_BYTES = 512 << 20
"""Bytes of partial results of decode, which the longest contexts of many rows would exceed: a
program then computes whole rows."""


MOST_TOKENS = 64
"""Tokens whose chosen latents are copied at once."""
BLOCK = 64
"""Latents of a block of copies."""


class LatentRows(NamedTuple):
    """Rows that decode; see `latent_decode`."""

    seq_lens: torch.Tensor
    table_rows: torch.Tensor
    block_tables: torch.Tensor
    plan: LatentPlan


class ChosenWorkspace:
    """Plan of attention to the copies of chosen latents, some tokens at a time."""

    def __init__(self, num_heads: int, rank: int, num_chosen: int, device: torch.device) -> None:
        blocks = -(-num_chosen // BLOCK)
        self.room = blocks * BLOCK
        """Latents that a token has room for."""
        self._table_rows = torch.arange(MOST_TOKENS, dtype=torch.int32, device=device)
        self._block_tables = torch.arange(
            MOST_TOKENS * blocks, dtype=torch.int32, device=device
        ).view(MOST_TOKENS, blocks)
        self._plan = LatentPlan.allocate(
            max_rows=MOST_TOKENS,
            max_seq_len=self.room,
            num_heads=num_heads,
            rank=rank,
            device=device,
        )

    def rows(self, num_chosen: torch.Tensor) -> LatentRows:
        """Rows of the copies of tokens, which chose so many latents, int32 [N]."""
        plan_latents(self._plan, num_chosen)
        return LatentRows(num_chosen, self._table_rows, self._block_tables, self._plan)


class LatentPlans(AttentionPlans):
    """Programs merge a row's first splits wherever that divides the work evenly, so each plan
    folds."""

    can_fold = False

    def __init__(
        self,
        model: ModelConfig,
        block_size: int,
        *,
        max_decodes: int,
        max_model_len: int,
        device: torch.device,
    ) -> None:
        assert model.latent is not None
        self._device = device
        self._block_size = block_size
        self._num_heads = model.num_heads
        rank = model.latent.kv_rank
        most = max_decodes * -(-max_model_len // SPLIT)
        self._decode_plan = LatentPlan.allocate(
            max_rows=max_decodes,
            max_seq_len=max_model_len,
            num_heads=model.num_heads,
            rank=rank,
            device=device,
            max_partials=min(most, MOST_PARTIAL_BYTES // (4 * model.num_heads * rank)),
        )
        self._ends = self._decode_plan.beside()
        self.chosen: ChosenWorkspace | None = None
        """Workspace of sparse indexers; None: the model has none."""
        if model.index is not None:
            self.chosen = ChosenWorkspace(model.num_heads, rank, model.index.num_chosen, device)
        self.totals = room_for_totals(rank, device)
        """Workspace of prefill; see `latent_prefill`."""

    def decode(self, num_rows: int, *, folds: bool = False) -> LatentPlan:
        return self._decode_plan

    def windowed(self, num_rows: int) -> LatentPlan:
        return self._decode_plan

    def ends(self, *, folds: bool) -> tuple[LatentPlan, LatentPlan]:
        return self._ends, self._ends

    def list_tiles(self, counts: Int32Array, starts: Int32Array) -> Int32Array:
        return list_row_tiles(counts, starts, self._num_heads)

    def max_tiles(self, num_tokens: int, num_chunks: int) -> int:
        return num_tokens * self._num_heads // ROWS + num_chunks

    def refresh(self, plan: AttentionPlan) -> None:
        if plan.num_decodes:
            assert isinstance(plan.decode, LatentPlan)
            plan_latents(plan.decode, plan.seq_lens)


def plans_for(model: ModelConfig, block_size: int, **sizes: Any) -> AttentionPlans:
    """Plans of a model's attention; arguments are those of `AttentionPlans`."""
    plans = AttentionPlans if model.latent is None else LatentPlans
    return plans(model, block_size, **sizes)
