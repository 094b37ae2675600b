"""The decoder of Llama, Mistral, Qwen2 and Qwen3: token rows in, hidden states of the sampled rows and logits out.

Knows nothing about devices (see `platforms`), requests or sampling.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from headwater.engine_core.batch import ForwardBatch
from headwater.engine_core.model_config import ModelConfig
from headwater.engine_core.platforms.platform import Platform
from headwater.engine_core.rope import cos_sin_table
from headwater.engine_core.weights import Weights


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of one layer, as `weights.shapes` names them."""

    input_norm: torch.Tensor
    qkv: torch.Tensor
    o: torch.Tensor
    post_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    qkv_bias: torch.Tensor | None = None
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None


class Decoder:
    """Holds weights; the KV cache is the caller's."""

    def __init__(self, config: ModelConfig, weights: Weights, platform: Platform, max_model_len: int) -> None:
        self.config, self.dtype = config, weights["final_norm"].dtype
        self._platform = platform
        self.embed, self.final_norm, self.lm_head = weights["embed"], weights["final_norm"], weights["lm_head"]
        self.layers = [_layer(weights, f"layers.{i}.") for i in range(config.num_layers)]
        self.cos_sin = cos_sin_table(config, max_model_len).to(platform.device)

    def forward(
        self,
        batch: ForwardBatch,
        kv_cache: torch.Tensor,
        attention_plan: Any = None,
        num_layers: int | None = None,
    ) -> torch.Tensor:
        """Normed hidden states [T, H]. kv_cache [layers, 2, num_blocks, Hk, block_size, D] takes the batch's keys and
        values. The attention plan is the platform's, made here when it is not given. With fewer layers than there are
        it launches what the whole does and computes nothing of use."""
        platform, eps = self._platform, self.config.rms_norm_eps
        attention_plan = attention_plan or platform.plan_attention(batch)
        residual = self.embed[batch.token_ids]
        x = platform.rms_norm(residual, self.layers[0].input_norm, eps)
        for i, layer in enumerate(self.layers[:num_layers]):
            x = self._attend(layer, x, batch, kv_cache[i], attention_plan)
            x = platform.add_rms_norm(x, residual, layer.post_norm, eps)
            x = platform.linear(platform.linear_silu_mul(x, layer.gate_up), layer.down)
            is_last = i + 1 == len(self.layers)
            x = platform.add_rms_norm(x, residual, self.final_norm if is_last else self.layers[i + 1].input_norm, eps)
        return x

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [S, H] → [S, V] in the weights' dtype."""
        return self._platform.linear(hidden, self.lm_head)

    def _attend(
        self, layer: Layer, x: torch.Tensor, batch: ForwardBatch, kv_cache: torch.Tensor, attention_plan: Any
    ) -> torch.Tensor:
        platform = self._platform
        q = platform.qk_norm_rope_store_kv(
            platform.linear(x, layer.qkv),
            batch,
            self.cos_sin,
            kv_cache,
            bias=layer.qkv_bias,
            q_norm=layer.q_norm,
            k_norm=layer.k_norm,
            eps=self.config.rms_norm_eps,
        )
        return platform.linear(platform.attention(q, kv_cache, attention_plan), layer.o)


def _layer(weights: Weights, prefix: str) -> Layer:
    own = {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}
    return Layer(**own)
