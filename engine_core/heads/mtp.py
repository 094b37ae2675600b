"""Multi-token prediction: a decoder layer of the served model's own checkpoint, which reads the
last hidden state beside the token that followed it, and goes on from its own output. Source:
DeepSeek-AI, "DeepSeek-V3 technical report", 2024, with the order and the norms of its, Qwen3-Next's
and GLM-4.5's checkpoints: embedding and head are the served model's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..executor import Int32Array
from ..layers.batch import ForwardBatch, last_tokens
from ..layers.linear.kinds import Weights
from ..layers.platform import Platform
from ..models.decoder import Layer
from ..models.model import LastTokens
from ..models.mtp import EMBEDDING_NORM, FC, FINAL_NORM, HIDDEN_NORM, LAYER
from ..models.parts import Parts
from ..weights.model_config import ModelConfig
from .served import Served


class Mtp:
    """See `ChainHeads`."""

    layers: tuple[int, ...] = ()
    looks_at_all = True

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        platform: Platform,
        served: Served,
        max_model_len: int,
    ) -> None:
        """config: of the one layer."""
        parts = Parts(config, weights, platform, max_model_len)
        self.config = config
        self._platform = platform
        self._served = served
        self._embedding_norm = parts.norm(EMBEDDING_NORM)
        self._hidden_norm = parts.norm(HIDDEN_NORM)
        self._fc = platform.linear(weights.linears[FC])
        post_norm = parts.norm_of_mlp(LAYER + "post_norm", 0)
        self._layer = Layer(
            input_norm=parts.norm(LAYER + "input_norm"),
            attention=parts.mixer(0),
            post_norm=post_norm,
            mlp=parts.mlp(0, post_norm),
        )
        self._final_norm = parts.norm(FINAL_NORM)

    def features(self, final: torch.Tensor, inputs: Mapping[int, torch.Tensor]) -> torch.Tensor:
        return final

    def ends(self, batch: ForwardBatch, num_wanted: Int32Array) -> LastTokens:
        own = last_tokens(batch, num_wanted)
        return LastTokens(own.sampled, self._platform.plan_attention(own, of_ends=True))

    def forward(
        self,
        batch: ForwardBatch,
        features: torch.Tensor,
        kv_cache: torch.Tensor,
        attention_plan: Any = None,
        *,
        ends: LastTokens | None = None,
    ) -> torch.Tensor:
        layer = self._layer
        embedded = self._embedding_norm(self._served.embedding(batch.token_ids))
        residual = self._fc(torch.cat((embedded, self._hidden_norm(features)), dim=1))
        queries = layer.attention.queries(layer.input_norm(residual), batch, kv_cache[0])
        if ends is not None:
            if not len(ends.tokens):
                return residual[:0]
            queries = layer.attention.kept(queries, ends.tokens)
            residual = residual.index_select(0, ends.tokens)
            attention_plan = ends.attention_plan
        attended = layer.attention.attend(queries, kv_cache[0], attention_plan)
        return self._final_norm.add(layer.behind_attention(attended, residual), residual)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._served.logits(hidden)
