"""What a device must offer: each operation of a decoder, with the implementation chosen in one place a device."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from headwater.engine_core.executors.batch import ForwardBatch
from headwater.engine_core.sampling.operations import SamplingOperations


class Platform(Protocol):
    """Shapes as in `kernels`: T tokens, H hidden, Hq and Hk query and key heads, D head size."""

    device: torch.device
    sampling: SamplingOperations

    def plan_attention(self, batch: ForwardBatch, *, of_ends: bool = False) -> Any:
        """What `attention` needs to know of a batch, made once for all layers; `of_ends`: for the last one alone, where
        some tokens of a batch that has a plan already decode."""

    def linear(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """x [T, K], weight [N, K] → [T, N]."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x [T, H] → [T, H]."""

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """residual += x in place; the norm of the sum."""

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
        """qkv [T, (Hq + 2 Hk) D] → q [T, Hq, D]; keys and values go to the layer's kv_cache
        [2, num_blocks, Hk, block_size, D]."""

    def attention(self, q: torch.Tensor, kv_cache: torch.Tensor, attention_plan: Any) -> torch.Tensor:
        """q [T, Hq, D] → [T, Hq D]; keys and values are read back from the cache, those of this step too."""

    def linear_silu_mul(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """x [T, K], weight [2 I, K], gates first → [T, I]."""
