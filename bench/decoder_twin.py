"""The decoder of Llama, Mistral, Qwen2 and Qwen3 in plain torch, over whole texts, so that autograd
can differentiate it. Its weights have the names and shapes of `models.decoder.Decoder.layout`."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear, rms_norm, scaled_dot_product_attention, silu

from headwater.engine_core.config import ConfigError
from headwater.engine_core.layers.rope import cos_sin_table
from headwater.engine_core.models.decoder import Decoder
from headwater.engine_core.models.model import model_class
from headwater.engine_core.weights.model_config import ModelConfig
from headwater.engine_core.weights.model_file import Tensors


class DecoderTwin:
    """B texts of T tokens, H hidden, Hq and Hk query and key heads of D."""

    def __init__(self, config: ModelConfig, tensors: Tensors) -> None:
        """Builds the decoder. Raises `ConfigError` for an architecture of other layers."""
        if not issubclass(model_class(config), Decoder):
            raise ConfigError(
                "architectures", config.architecture, "one with the layers of Llama, Qwen2 or Qwen3"
            )
        self.config = config
        self.tensors = tensors

    def hidden(self, token_ids: Tensor, inputs: dict[int, Tensor] | None = None) -> Tensor:
        """Normed hidden states [B, T, H] of token_ids int64 [B, T]. `inputs` receives the states
        before each layer that is a key of it."""
        cos, sin = (
            cos_sin_table(self.config, token_ids.shape[1]).to(token_ids.device).chunk(2, dim=1)
        )
        x = embedding(token_ids, self.tensors["embed"])
        for i in range(self.config.num_layers):
            if inputs is not None and i in inputs:
                inputs[i] = x
            x = x + self._attention(
                self._norm(x, f"layers.{i}.input_norm"), f"layers.{i}.", cos, sin
            )
            x = x + self._mlp(self._norm(x, f"layers.{i}.post_norm"), f"layers.{i}.")
        return self._norm(x, "final_norm")

    @property
    def vocabulary(self) -> Tensor:
        """Weight of the head, [V, H]."""
        return self.tensors["embed" if self.config.tie_word_embeddings else "lm_head"]

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of hidden states […, H], float32 […, V]."""
        return linear(hidden, self.vocabulary).float()

    def _norm(self, x: Tensor, name: str) -> Tensor:
        weight = self.tensors[name]
        return rms_norm(x.float(), weight.shape, weight.float(), self.config.rms_norm_eps).to(
            x.dtype
        )

    def _attention(self, x: Tensor, prefix: str, cos: Tensor, sin: Tensor) -> Tensor:
        config, (num_texts, length, _) = self.config, x.shape
        qkv = linear(x, self.tensors[prefix + "qkv"], self.tensors.get(prefix + "qkv_bias"))
        sizes = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
        heads = qkv.view(num_texts, length, sum(sizes), config.head_dim).transpose(1, 2)
        q, k, v = torch.split(heads, sizes, dim=1)
        if config.qk_norm:
            q = self._norm(q, prefix + "q_norm")
            k = self._norm(k, prefix + "k_norm")
        q = rotated(q, cos, sin)
        k = rotated(k, cos, sin)
        read = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return linear(read.transpose(1, 2).flatten(2), self.tensors[prefix + "o"])

    def _mlp(self, x: Tensor, prefix: str) -> Tensor:
        gates, ups = linear(x, self.tensors[prefix + "gate_up"]).chunk(2, dim=-1)
        return linear(silu(gates) * ups, self.tensors[prefix + "down"])


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates x [B, heads, T, D] by cos and sin [T, D / 2]: halves of each head are rotated by
    their position."""
    low, high = x.float().chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).to(x.dtype)
