"""A platform whose operations are those of the specification: slow, on a CPU, for the decoder that
others are compared with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headwater.kernels.attention.rotary_pairs import RotaryPairs
from headwater.kernels.sampling.filtered_sample import Filters
from headwater.kernels.sampling.sample import Draws

from ..config import EngineConfig
from ..layers.batch import ForwardBatch
from ..layers.linear.dense import DenseLinear
from ..layers.linear.linear import Linear, Product
from ..layers.routing import ExpertProduct, ExpertStack, Router, Routes
from ..platforms import specification
from ..sampling.operations import SamplingOperations
from ..weights.model_config import ModelConfig


class ReferenceSampling:
    """See `SamplingOperations`."""

    def draw(self, logits: Tensor, draws: Draws, masks: Tensor | None = None) -> Tensor:
        logits = logits if masks is None else specification.mask_tokens(logits, masks)
        return specification.scores(logits, draws).argmax(1).int()

    def draw_filtered(self, logits: Tensor, draws: Draws, filters: Filters) -> Tensor:
        kept = specification.filtered(logits, draws, filters)
        return specification.scores(logits, draws).masked_fill(~kept, float("-inf")).argmax(1).int()

    def mask_tokens(self, logits: Tensor, masks: Tensor) -> Tensor:
        return specification.mask_tokens(logits, masks).float()

    def logprobs(
        self, logits: Tensor, token_ids: Tensor, num_top: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        every = specification.logprobs(logits)
        best = every.sort(dim=1, descending=True, stable=True)
        chosen = every.gather(1, token_ids.long()[:, None])[:, 0]
        return chosen.float(), best.indices[:, :num_top].int(), best.values[:, :num_top].float()


class ReferencePlatform:
    """See `Platform`. A result has the type of the operation's input."""

    device = torch.device("cpu")
    sampling: SamplingOperations = ReferenceSampling()

    @classmethod
    def of(cls, model: ModelConfig, config: EngineConfig) -> ReferencePlatform:
        return cls()

    def plan_attention(self, batch: ForwardBatch, *, of_ends: bool = False) -> ForwardBatch:
        return batch

    def linear(self, linear: Linear) -> Product:
        assert isinstance(linear, DenseLinear)
        return lambda x: specification.linear(x, linear.weight).to(x.dtype)

    def gated_linear(self, linear: Linear, activation: str) -> Product | None:
        assert isinstance(linear, DenseLinear)
        return lambda x: specification.gated_linear(x, linear.weight, activation).to(x.dtype)

    def gate(self, x: Tensor, activation: str) -> Tensor:
        return specification.gate(x, activation).to(x.dtype)

    def activation(self, x: Tensor, name: str) -> Tensor:
        return specification.activation(x, name).to(x.dtype)

    def route(self, logits: Tensor, router: Router) -> Routes:
        return specification.route(logits, router)

    def experts(self, gate_up: ExpertStack, down: ExpertStack, activation: str) -> ExpertProduct:
        weights = gate_up.weight, down.weight
        biases = None
        if gate_up.bias is not None and down.bias is not None:
            biases = gate_up.bias, down.bias
        return lambda x, routes: specification.experts(x, routes, *weights, activation, biases).to(
            x.dtype
        )

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return specification.rms_norm(x, weight, eps).to(x.dtype)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        norm, total = specification.add_rms_norm(x, residual, weight, eps)
        residual.copy_(total)
        return norm.to(x.dtype)

    def qk_norm_rope_store_kv(
        self,
        qkv: Tensor,
        batch: ForwardBatch,
        cos_sin: Tensor,
        kv_cache: Tensor,
        *,
        bias: Tensor | None,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
        pairs: RotaryPairs | None = None,
    ) -> Tensor:
        q, k, v = specification.qk_norm_rope(
            qkv,
            batch.positions,
            cos_sin,
            kv_cache.shape[2],
            bias=bias,
            q_norm=q_norm,
            k_norm=k_norm,
            eps=eps,
            pairs=pairs,
        )
        specification.store_kv(k, v, batch.slots, kv_cache)
        return q.to(qkv.dtype)

    def attention(
        self,
        q: Tensor,
        kv_cache: Tensor,
        attention_plan: ForwardBatch,
        *,
        scale: float | None = None,
        window: int = 0,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
    ) -> Tensor:
        starts = attention_plan.starts.tolist()
        counts = attention_plan.counts.tolist()
        tables = attention_plan.block_tables
        shape: dict[str, Any] = {
            "scale": scale,
            "window": window,
            "softcap": softcap,
            "sinks": sinks,
        }
        return specification.attention(q, kv_cache, starts, counts, tables, **shape).to(q.dtype)
