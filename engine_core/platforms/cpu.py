"""Operations on a CPU: plain torch, in forms whose bits do not depend on what else is in the batch."""

from __future__ import annotations

import torch
from torch.nn import functional

from headwater.engine_core.batch import ForwardBatch
from headwater.kernels.packed_linear import is_packed
from headwater.kernels.row_stable_linear import RowRule, row_rule, row_stable_linear
from headwater.kernels.split_attention import SplitPlan, plan_splits, split_attention


class CpuPlatform:
    """See `Platform`."""

    device = torch.device("cpu")

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._row_rules: dict[tuple[torch.dtype, tuple[int, ...], bool], RowRule] = {}

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
        _, _, num_kv_heads, block_size, head_dim = kv_cache.shape
        if bias is not None:
            qkv = qkv + bias
        heads = qkv.view(qkv.shape[0], -1, head_dim)
        num_q_heads = heads.shape[1] - 2 * num_kv_heads
        q, k, v = torch.split(heads, [num_q_heads, num_kv_heads, num_kv_heads], dim=1)
        if q_norm is not None and k_norm is not None:
            q = functional.rms_norm(q, (head_dim,), q_norm, eps)
            k = functional.rms_norm(k, (head_dim,), k_norm, eps)
            rotated = _rotate(torch.cat((q, k), dim=1), cos_sin[batch.positions])
        else:
            rotated = _rotate(heads[:, : num_q_heads + num_kv_heads], cos_sin[batch.positions])
        blocks, offsets = batch.slots // block_size, batch.slots % block_size
        kv_cache[0, blocks, :, offsets] = rotated[:, num_q_heads:]
        kv_cache[1, blocks, :, offsets] = v
        return rotated[:, :num_q_heads].contiguous()

    def attention(self, q: torch.Tensor, kv_cache: torch.Tensor, attention_plan: SplitPlan) -> torch.Tensor:
        out = split_attention(q, kv_cache[0], kv_cache[1], attention_plan, q.shape[2] ** -0.5)
        return out.flatten(1)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.silu(gate).mul_(up)


def _rotate(x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """x [T, heads, D], cos_sin float32 [T, D]; computed in float32, rounded once."""
    cos, sin = cos_sin.unsqueeze(1).chunk(2, dim=-1)
    low, high = x.float().chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).to(x.dtype)
