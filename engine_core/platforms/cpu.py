"""Operations on a CPU, in forms whose bits do not depend on what else is in the batch."""

from __future__ import annotations

from collections.abc import Callable

import torch

from headwater.engine_core.config import EngineConfig
from headwater.engine_core.executors.batch import ForwardBatch
from headwater.engine_core.model_config import ModelConfig
from headwater.engine_core.platforms.cpu_sampling import CpuSampling
from headwater.engine_core.sampling.operations import SamplingOperations
from headwater.engine_core.weights.checkpoint import Weights
from headwater.kernels.cpu import attention as attention_kernel
from headwater.kernels.cpu import draw as draw_kernel
from headwater.kernels.cpu import qk_norm_rope_store_kv as qk_kernel
from headwater.kernels.cpu import rms_norm as norm_kernel
from headwater.kernels.cpu import silu_mul as silu_kernel
from headwater.kernels.cpu.attention import AttentionPlan, attention, plan_attention
from headwater.kernels.cpu.compiled import DTYPES
from headwater.kernels.cpu.qk_norm_rope_store_kv import qk_norm_rope_store_kv
from headwater.kernels.cpu.rms_norm import add_rms_norm, rms_norm
from headwater.kernels.cpu.silu_mul import silu_mul
from headwater.kernels.packed_linear import is_packed
from headwater.kernels.row_stable_linear import RowRule, row_rule, row_stable_linear

CPU_DTYPES = DTYPES
"""That a CPU serves."""


class CpuPlatform:
    """See `Platform`."""

    device = torch.device("cpu")
    sampling: SamplingOperations = CpuSampling()

    def __init__(self, model: ModelConfig, block_size: int) -> None:
        self._group = model.num_heads // model.num_kv_heads
        self._scale = model.head_dim**-0.5
        self._row_rules: dict[tuple[torch.dtype, tuple[int, ...], bool], RowRule] = {}

    @classmethod
    def of(cls, model: ModelConfig, config: EngineConfig) -> CpuPlatform:
        return cls(model, config.block_size)

    def prepare(self, weights: Weights, progress: Callable[[int, int], None]) -> None:
        """Does what the first step would otherwise wait for: kernels are loaded, products are probed."""
        compile_kernels(weights["embed"].dtype, progress)
        for name, weight in weights.items():
            if weight.dim() == 2 and name != "embed":
                self._row_rule(weight)

    def plan_attention(self, batch: ForwardBatch, *, of_ends: bool = False) -> AttentionPlan:
        return plan_attention(batch.starts, batch.counts, batch.block_tables, self._group)

    def linear(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return row_stable_linear(x, weight, self._row_rule(weight))

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return rms_norm(x, weight, eps)

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return add_rms_norm(x, residual, weight, eps)

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
        return qk_norm_rope_store_kv(
            qkv, batch.positions, batch.slots, cos_sin, kv_cache, bias=bias, q_norm=q_norm, k_norm=k_norm, eps=eps
        )

    def attention(self, q: torch.Tensor, kv_cache: torch.Tensor, attention_plan: AttentionPlan) -> torch.Tensor:
        return attention(q, kv_cache, attention_plan, self._scale).flatten(1)

    def linear_silu_mul(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return silu_mul(self.linear(x, weight))

    def _row_rule(self, weight: torch.Tensor) -> RowRule:
        kind = (weight.dtype, tuple(weight.shape), is_packed(weight))
        if kind not in self._row_rules:
            self._row_rules[kind] = row_rule(weight)
        return self._row_rules[kind]


def compile_kernels(dtype: torch.dtype, progress: Callable[[int, int], None]) -> None:
    """Compiles what a model of this type needs, unless it was compiled before. float16 is served on GPUs only."""
    kernels = (attention_kernel, qk_kernel, norm_kernel, silu_kernel, draw_kernel)
    for done, kernel in enumerate(kernels, start=1):
        if dtype in DTYPES:
            kernel.KERNEL.compile(dtype)
        progress(done, len(kernels))
