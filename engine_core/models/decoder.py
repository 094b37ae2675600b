"""The decoder of Llama, Mistral, Qwen2 and Qwen3: token rows in, hidden states of the sampled rows and logits out.

Knows nothing about devices (see `platforms`), requests or sampling.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from headwater.engine_core.executor import BoolArray
from headwater.engine_core.executors.batch import ForwardBatch, last_tokens
from headwater.engine_core.layers.rope import cos_sin_table
from headwater.engine_core.model_config import ModelConfig
from headwater.engine_core.platforms.platform import Platform
from headwater.engine_core.weights.checkpoint import Weights


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of one layer, as `checkpoint.shapes` names them."""

    input_norm: torch.Tensor
    qkv: torch.Tensor
    o: torch.Tensor
    post_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    qkv_bias: torch.Tensor | None = None
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Ends:
    """The tokens of a batch that somebody looks at. What the last layer makes of the others but keys and values is no
    part of anything, so it is left out: a layer's share of every prompt."""

    tokens: torch.Tensor
    """Integers [E] into the batch."""
    attention_plan: Any
    """The platform's: each of them decodes."""


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
        *,
        ends: Ends | None = None,
        num_layers: int | None = None,
    ) -> torch.Tensor:
        """Normed hidden states [T, H], or [E, H] of the ends. kv_cache [layers, 2, num_blocks, Hk, block_size, D] takes
        the batch's keys and values. The attention plan is the platform's, made here when it is not given. With fewer
        layers than there are, the first ones and the last, it launches what the whole does and computes nothing of
        use."""
        platform, eps, last = self._platform, self.config.rms_norm_eps, len(self.layers) - 1
        attention_plan = attention_plan or platform.plan_attention(batch)
        residual = self.embed[batch.token_ids]
        x = platform.rms_norm(residual, self.layers[0].input_norm, eps)
        for i in [*range(last if num_layers is None else min(num_layers - 1, last)), last]:
            layer = self.layers[i]
            q = self._queries(layer, x, batch, kv_cache[i])
            if i == last and ends is not None:
                if not len(ends.tokens):
                    return residual[:0]
                q, residual = q.index_select(0, ends.tokens), residual.index_select(0, ends.tokens)
                attention_plan = ends.attention_plan
            x = platform.linear(platform.attention(q, kv_cache[i], attention_plan), layer.o)
            x = platform.add_rms_norm(x, residual, layer.post_norm, eps)
            x = platform.linear(platform.linear_silu_mul(x, layer.gate_up), layer.down)
            x = platform.add_rms_norm(x, residual, self.final_norm if i == last else self.layers[i + 1].input_norm, eps)
        return x

    def ends(self, batch: ForwardBatch, is_looked_at: BoolArray) -> Ends:
        """The last token of each request that is looked at, bools [R]."""
        own = last_tokens(batch, is_looked_at)
        return Ends(own.sampled, self._platform.plan_attention(own, of_ends=True))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [S, H] → [S, V] in the weights' dtype."""
        return self._platform.linear(hidden, self.lm_head)

    def _queries(self, layer: Layer, x: torch.Tensor, batch: ForwardBatch, kv_cache: torch.Tensor) -> torch.Tensor:
        """[T, Hq, D]; keys and values are in the layer's cache."""
        return self._platform.qk_norm_rope_store_kv(
            self._platform.linear(x, layer.qkv),
            batch,
            self.cos_sin,
            kv_cache,
            bias=layer.qkv_bias,
            q_norm=layer.q_norm,
            k_norm=layer.k_norm,
            eps=self.config.rms_norm_eps,
        )


def _layer(weights: Weights, prefix: str) -> Layer:
    own = {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}
    return Layer(**own)
