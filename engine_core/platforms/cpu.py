"""Operations on a CPU, in forms whose bits do not depend on what else is in the batch."""

from __future__ import annotations

from collections.abc import Callable

import torch

from headwater.kernels.attention.rotary_pairs import RotaryPairs
from headwater.kernels.cpu.activation import activation
from headwater.kernels.cpu.adapter_product import RowAdditions
from headwater.kernels.cpu.attention import AttentionPlan, attention, plan_attention
from headwater.kernels.cpu.compiler.compiled import DTYPES
from headwater.kernels.cpu.qk_norm_rope_store_kv import qk_norm_rope_store_kv
from headwater.kernels.cpu.rms_norm import add_rms_norm, rms_norm
from headwater.kernels.cpu.silu_mul import GATES

from ..config import EngineConfig
from ..layers.batch import ForwardBatch
from ..layers.linear.kinds import Weights
from ..layers.linear.linear import Linear, Product
from ..layers.routing import ExpertProduct, ExpertStack, Router, Routes
from ..sampling.operations import SamplingOperations
from ..weights.model_config import ModelConfig
from .cpu_experts import CpuExperts, route
from .cpu_kernels import compile_kernels, layer_kernels, packed_kernels
from .cpu_products import CpuProducts
from .cpu_sampling import CpuSampling
from .encoders.cpu import CpuTexts
from .latents.cpu import CpuLatents
from .states.cpu import CpuStates

CPU_DTYPES = DTYPES
"""Types of weights that a CPU serves."""


class CpuPlatform(CpuTexts, CpuStates, CpuLatents, RowAdditions):
    """See `Platform`."""

    device = torch.device("cpu")
    sampling: SamplingOperations = CpuSampling()

    def __init__(self, model: ModelConfig, block_size: int) -> None:
        # Query heads of a key head, in layers that see all keys and in layers with a window.
        self._groups = _group_of(model.of_global_layers), _group_of(model)
        # Number of latents that the indexer chooses for a token; 0: there is no indexer.
        self._num_chosen = 0 if model.index is None else model.index.num_chosen
        self._layer_kernels = layer_kernels(model)
        self.block_size = block_size
        super().__init__(CpuProducts())

    @classmethod
    def of(cls, model: ModelConfig, config: EngineConfig) -> CpuPlatform:
        return cls(model, config.block_size)

    def prepare(self, weights: Weights, progress: Callable[[int, int], None]) -> None:
        """Does what the first step would otherwise wait for: kernels are loaded, products are
        probed."""
        dtype = weights.table("embed").dtype
        used = packed_kernels(weights, self._layer_kernels)
        compile_kernels(dtype, progress, used)
        for linear in weights.linears.values():
            self.linear(linear)
        for stack in weights.experts.values():
            # All experts of a layer have the shape of the first.
            self.linear(stack.expert(0))

    def plan_attention(self, batch: ForwardBatch, *, of_ends: bool = False) -> object:
        group, windowed_group = self._groups
        requests = batch.starts, batch.counts, batch.block_tables
        if self._num_chosen:
            return self.plan_chosen(batch, group, self._num_chosen)
        windowed = None if windowed_group == group else plan_attention(*requests, windowed_group)
        return plan_attention(*requests, group, windowed)

    def linear(self, linear: Linear) -> Product:
        return self._products.of(linear)

    def gated_linear(self, linear: Linear, activation: str) -> None:
        """None: no product computes its gate too."""

    def gate(self, x: torch.Tensor, activation: str) -> torch.Tensor:
        return GATES[activation](x)

    def activation(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return activation(x, name)

    def route(self, logits: torch.Tensor, router: Router) -> Routes:
        return route(logits, router)

    def experts(self, gate_up: ExpertStack, down: ExpertStack, activation: str) -> ExpertProduct:
        return CpuExperts(gate_up, down, activation, self.linear)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return rms_norm(x, weight, eps)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
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
        pairs: RotaryPairs | None = None,
    ) -> torch.Tensor:
        return qk_norm_rope_store_kv(
            qkv,
            batch.positions,
            batch.slots,
            cos_sin,
            kv_cache,
            bias=bias,
            q_norm=q_norm,
            k_norm=k_norm,
            eps=eps,
            pairs=pairs,
        )

    def attention(
        self,
        q: torch.Tensor,
        kv_cache: torch.Tensor,
        attention_plan: AttentionPlan,
        *,
        scale: float | None = None,
        window: int = 0,
        softcap: float = 0.0,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        scale = scale or q.shape[2] ** -0.5
        plan = (window and attention_plan.windowed) or attention_plan
        return attention(
            q, kv_cache, plan, scale, window=window, softcap=softcap, sinks=sinks
        ).flatten(1)


def _group_of(model: ModelConfig) -> int:
    return model.num_heads // model.num_kv_heads
