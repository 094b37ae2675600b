"""Plans of attention on an NVIDIA GPU: which tokens decode, which are chunks of prompts, and the
workspace of decode kernels."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from headwater.kernels.attention.decode_plan import DecodePlan, plan_decode
from headwater.kernels.attention.prefill_attention import list_tiles, tokens_per_tile
from headwater.kernels.latent.latent_plan import LatentPlan
from headwater.kernels.launch.device import upload

from ..executor import Int32Array
from ..layers.batch import ForwardBatch
from ..weights.model_config import ModelConfig

DEPENDENT_ROWS = 8
"""Up to this many tokens attention of a few rows starts while the kernel before it ends."""
SHARING_ROWS = 8
"""Fewest decoding rows for which plans look for blocks that rows share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionPlan:
    """The first tokens of a batch decode, one a request; the others are chunks of any size. Tensors
    are on the device.

    A plan of fixed size serves many steps: a decode of length 0 and a tile of a negative chunk
    belong to no request, and kernels write nothing for them.
    """

    num_decodes: int
    seq_lens: torch.Tensor
    """int32 [num_decodes]: keys that each reads, its own included."""
    table_rows: torch.Tensor
    """int32 [num_decodes] into block_tables."""
    block_tables: torch.Tensor
    """int32 [rows, blocks]"""
    decode: DecodePlan | LatentPlan
    windowed: DecodePlan | LatentPlan
    """Like `decode`, for layers with a sliding window."""
    shares: bool
    chunk_lens: torch.Tensor
    """int32 [chunks]: keys that the last token of each reads."""
    chunk_rows: torch.Tensor
    """int32 [chunks] into block_tables."""
    query_starts: torch.Tensor
    """int32 [chunks + 1] into the tokens of the batch."""
    tiles: torch.Tensor
    """int32 [tiles, 2] of the chunks, as `list_tiles` makes them."""
    dependent: bool

    def of_keys(self) -> tuple[DecodePlan, DecodePlan]:
        """`decode` and `windowed`, of a model whose layers cache keys and values."""
        assert isinstance(self.decode, DecodePlan)
        assert isinstance(self.windowed, DecodePlan)
        return self.decode, self.windowed


class AttentionPlans:
    """Makes attention plans for one stream of launches, and holds its workspace."""

    def __init__(
        self,
        model: ModelConfig,
        block_size: int,
        *,
        max_decodes: int,
        max_model_len: int,
        device: torch.device,
    ) -> None:
        self._device = device
        self._block_size = block_size
        kinds = (model, model.of_global_layers)
        groups = {kind.num_heads // kind.num_kv_heads for kind in kinds}
        self.tile_tokens = max(tokens_per_tile(group, device) for group in groups)
        """Tokens of a tile of a prompt's chunk."""

        self.can_fold = model.mixed is None
        """Whether first splits may be folded: layers of one shape."""

        def allocated(heads: ModelConfig) -> list[DecodePlan]:
            return [
                DecodePlan.allocate(
                    max_rows=max_rows,
                    max_seq_len=max_model_len,
                    num_q_heads=heads.num_heads,
                    num_kv_heads=heads.num_kv_heads,
                    head_dim=heads.head_dim,
                    device=device,
                    fold=self.can_fold,
                )
                for max_rows in sorted({1, max_decodes})
            ]

        self._decode_plans = allocated(model.of_global_layers)
        self._ends_plan = self._decode_plans[-1].beside()
        self._window = model.window_mask
        # Allocated only for models with windows.
        windowed = self._decode_plans if model.mixed is None else allocated(model)
        self._windowed_plans = [
            plan.without_folds().beside() if self._window else plan for plan in windowed
        ]
        self._windowed_ends_plan = (
            self._windowed_plans[-1].beside() if self._window else self._ends_plan
        )

    def decode(self, num_rows: int, *, folds: bool = False) -> DecodePlan | LatentPlan:
        """The workspace for `num_rows` decoding rows: a single row has one of its own, without a
        work list. With `folds`, for rows that share no blocks, the first splits are merged in
        registers."""
        plan = next(plan for plan in self._decode_plans if num_rows <= plan.max_rows)
        return plan if folds else plan.without_folds()

    def windowed(self, num_rows: int) -> DecodePlan | LatentPlan:
        """Like `decode`, for layers with a sliding window."""
        return next(plan for plan in self._windowed_plans if num_rows <= plan.max_rows)

    def ends(self, *, folds: bool) -> tuple[DecodePlan | LatentPlan, DecodePlan | LatentPlan]:
        """Like `decode` and `windowed`, for the last layer."""
        plan = self._ends_plan if folds else self._ends_plan.without_folds()
        return plan, self._windowed_ends_plan

    def of_batch(self, batch: ForwardBatch, *, of_ends: bool = False) -> AttentionPlan:
        """Rows of one token at the front of the batch take the decode kernels; one elsewhere is a
        chunk of one."""
        if of_ends:
            lens = self._to_device(batch.starts + 1)
            rows = self._to_device(np.arange(len(batch.starts)))
            return self.of_ends(lens, rows, batch.block_tables, shares=len(rows) >= SHARING_ROWS)
        longer = np.flatnonzero(batch.counts != 1)
        n = int(longer[0]) if len(longer) else len(batch.counts)
        seq_lens = batch.starts + batch.counts
        table_rows = np.arange(len(batch.counts))
        plan = AttentionPlan(
            num_decodes=n,
            seq_lens=self._to_device(seq_lens[:n]),
            table_rows=self._to_device(table_rows[:n]),
            block_tables=batch.block_tables,
            decode=self.decode(n),
            windowed=self.windowed(n),
            shares=n >= SHARING_ROWS,
            chunk_lens=self._to_device(seq_lens[n:]),
            chunk_rows=self._to_device(table_rows[n:]),
            query_starts=self._to_device(n + np.concatenate(([0], np.cumsum(batch.counts[n:])))),
            tiles=self._to_device(self.list_tiles(batch.counts[n:], batch.starts[n:])),
            dependent=len(batch.token_ids) <= DEPENDENT_ROWS,
        )
        self.refresh(plan)
        return plan

    def of_ends(
        self,
        seq_lens: torch.Tensor,
        table_rows: torch.Tensor,
        block_tables: torch.Tensor,
        *,
        shares: bool,
        folds: bool = False,
    ) -> AttentionPlan:
        """Plan of the last layer, where every row that is looked at decodes; beside that of the
        other layers."""
        nothing = seq_lens[:0]
        decode, windowed = self.ends(folds=folds)
        plan = AttentionPlan(
            num_decodes=len(seq_lens),
            seq_lens=seq_lens,
            table_rows=table_rows,
            block_tables=block_tables,
            decode=decode,
            windowed=windowed,
            shares=shares,
            chunk_lens=nothing,
            chunk_rows=nothing,
            query_starts=nothing,
            tiles=nothing.view(-1, 2),
            dependent=False,
        )
        self.refresh(plan)
        return plan

    def list_tiles(self, counts: Int32Array, starts: Int32Array) -> Int32Array:
        """The work list of prompt chunks, on the host: [tiles, 2]."""
        return list_tiles(counts, starts, self.tile_tokens)

    def max_tiles(self, num_tokens: int, num_chunks: int) -> int:
        """The longest work list of so many chunks with so many tokens in all."""
        return num_tokens // self.tile_tokens + num_chunks

    def refresh(self, plan: AttentionPlan) -> None:
        """Launches what follows a change of lengths or block tables; in a graph, it goes before the
        first layer."""
        decode, windowed = plan.of_keys()
        if plan.num_decodes and not decode.is_direct:
            where = plan.seq_lens, plan.table_rows, plan.block_tables, self._block_size
            plan_decode(decode, *where, share=plan.shares)
            if self._window:
                plan_decode(windowed, *where, share=False, window=self._window)

    def _to_device(self, values: np.ndarray[tuple[int, ...], np.dtype[np.integer]]) -> torch.Tensor:
        return upload(values.astype(np.int32), self._device)
