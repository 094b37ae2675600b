"""Operations on a CPU: plain torch, in forms whose bits do not depend on what else is in the batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from headwater.engine_core.batch import ForwardBatch
from headwater.kernels.packed_linear import is_packed
from headwater.kernels.row_stable_linear import RowRule, row_rule, row_stable_linear
from headwater.kernels.split_attention import SplitPlan, plan_splits, split_attention


@dataclass(frozen=True, slots=True)
class Places:
    """Where a batch's tokens stand: in their sequence and in the KV cache."""

    batch: ForwardBatch
    cos: torch.Tensor
    """float32 [T, 1, D / 2]"""
    sin: torch.Tensor
    lines: torch.Tensor
    """int64 [T x Hk] into a layer's keys or values seen as [num_blocks x Hk x block_size, D]."""


class CpuPlatform:
    """See `Platform`."""

    device = torch.device("cpu")

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._row_rules: dict[tuple[torch.dtype, tuple[int, ...], bool], RowRule] = {}
        self._places: Places | None = None

    def plan_attention(self, batch: ForwardBatch) -> SplitPlan:
        return plan_splits(batch.starts.tolist(), batch.counts.tolist(), batch.block_tables, self._block_size)

    def linear(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        kind = (weight.dtype, tuple(weight.shape), is_packed(weight))
        if kind not in self._row_rules:
            self._row_rules[kind] = row_rule(weight)
        return row_stable_linear(x, weight, self._row_rules[kind])

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return functional.rms_norm(x, weight.shape, weight, eps)

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        residual.add_(x)
        return functional.rms_norm(residual, weight.shape, weight, eps)

    def qk_norm_rope_store_kv(
        self,
        qkv: torch.Tensor,
        batch: ForwardBatch,
        cos_sin: torch.Tensor,
        kv_cache: torch.Tensor,
        *,
        bias: torch.Tensor | None,
        q_norm: torch.Tensor | None,
        k_norm: torch.Tensor | None,
        eps: float,
    ) -> torch.Tensor:
        _, _, num_kv_heads, _, head_dim = kv_cache.shape
        if bias is not None:
            qkv = qkv + bias
        heads = qkv.view(qkv.shape[0], -1, head_dim)
        num_q_heads = heads.shape[1] - 2 * num_kv_heads
        q, k, v = torch.split(heads, [num_q_heads, num_kv_heads, num_kv_heads], dim=1)
        if q_norm is not None and k_norm is not None:
            q = functional.rms_norm(q, (head_dim,), q_norm, eps)
            k = functional.rms_norm(k, (head_dim,), k_norm, eps)
            unrotated = torch.cat((q, k), dim=1)
        else:
            unrotated = heads[:, : num_q_heads + num_kv_heads]
        places = self._places_of(batch, cos_sin, num_kv_heads)
        rotated = _rotate(unrotated, places.cos, places.sin)
        lines = kv_cache.view(2, -1, head_dim)
        lines[0].index_copy_(0, places.lines, rotated[:, num_q_heads:].reshape(-1, head_dim))
        lines[1].index_copy_(0, places.lines, v.reshape(-1, head_dim))
        return rotated[:, :num_q_heads].contiguous()

    def _places_of(self, batch: ForwardBatch, cos_sin: torch.Tensor, num_kv_heads: int) -> Places:
        """Made at the first layer of a batch, used by all."""
        if self._places is None or self._places.batch is not batch:
            cos, sin = cos_sin[batch.positions].unsqueeze(1).chunk(2, dim=-1)
            blocks, offsets = batch.slots // self._block_size, batch.slots % self._block_size
            heads = blocks[:, None] * num_kv_heads + torch.arange(num_kv_heads)
            lines = (heads * self._block_size + offsets[:, None]).flatten()
            self._places = Places(batch, cos, sin, lines)
        return self._places

    def attention(self, q: torch.Tensor, kv_cache: torch.Tensor, attention_plan: SplitPlan) -> torch.Tensor:
        out = split_attention(q, kv_cache[0], kv_cache[1], attention_plan, q.shape[2] ** -0.5)
        return out.flatten(1)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.silu(gate).mul_(up)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [T, heads, D], cos and sin float32 [T, 1, D / 2]; computed in float32, rounded once."""
    low, high = x.float().chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).to(x.dtype)
