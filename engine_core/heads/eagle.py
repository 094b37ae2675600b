"""EAGLE: a decoder layer that reads the served model's last hidden state beside the token that
followed it, and goes on from its own output. Source: Li et al., "EAGLE: Speculative sampling
requires rethinking feature uncertainty", 2024, with the published code: no norm before attention,
head and embedding of the served model."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from ..executor import Int32Array
from ..layers.batch import ForwardBatch
from ..layers.linear.kinds import Weights
from ..layers.platform import Platform
from ..models.model import LastTokens
from ..weights.layout import Layout, linear, table
from ..weights.model_config import ModelConfig
from ..weights.model_file import Tensors
from ..weights.names import CheckpointNames
from . import draft_layer
from .checkpoint import HeadsFile, Shapes
from .draft_layer import DraftLayer
from .heads_config import HeadsConfig
from .served import Served

PREFIX = "layers.0."
NAMES = CheckpointNames(
    model={"fc.weight": "fc", "fc.bias": "fc_bias"},
    layer=draft_layer.NAMES,
    fused=draft_layer.FUSED,
    ignored=("embed_tokens.weight",),
)


class Eagle:
    """See `ChainHeads`."""

    layers: tuple[int, ...] = ()
    looks_at_all = True

    def __init__(
        self,
        config: HeadsConfig,
        weights: Weights,
        platform: Platform,
        served: Served,
        max_model_len: int,
    ) -> None:
        assert config.layer is not None
        self.config = config.layer
        self._served = served
        self._fc = platform.linear(weights.linears["fc"])
        self._fc_bias = weights.tensors.get("fc_bias")
        self._layer = DraftLayer(platform, config.layer, weights, max_model_len)

    @staticmethod
    def published(config: HeadsConfig, served: ModelConfig) -> tuple[Shapes, Shapes]:
        assert config.layer is not None
        hidden = served.hidden_size
        layer = draft_layer.published_shapes(config.layer, hidden)
        biases = draft_layer.published_biases(config.layer)
        required = {
            "fc.weight": (hidden, 2 * hidden),
            **{PREFIX + name: shape for name, shape in layer.items()},
        }
        optional = {"fc.bias": (hidden,), "embed_tokens.weight": (served.vocab_size, hidden)}
        return required, optional | {PREFIX + name: shape for name, shape in biases.items()}

    @staticmethod
    def collect(file: HeadsFile, config: HeadsConfig, dtype: torch.dtype) -> Tensors:
        tensors = (
            (name.replace(PREFIX, "model." + PREFIX), tensor) for name, tensor in file.tensors()
        )
        return NAMES.collect(tensors, dtype, lambda done: None)

    @staticmethod
    def layout(config: HeadsConfig, served: ModelConfig, names: Collection[str]) -> Layout:
        assert config.layer is not None
        hidden = served.hidden_size
        fc = {"fc": linear(hidden, 2 * hidden)} | (
            {"fc_bias": table(hidden)} if "fc_bias" in names else {}
        )
        return {**fc, **draft_layer.layout(config.layer, hidden, names)}

    def features(self, final: torch.Tensor, inputs: Mapping[int, torch.Tensor]) -> torch.Tensor:
        return final

    def ends(self, batch: ForwardBatch, num_wanted: Int32Array) -> LastTokens:
        return self._layer.ends(batch, num_wanted)

    def forward(
        self,
        batch: ForwardBatch,
        features: torch.Tensor,
        kv_cache: torch.Tensor,
        attention_plan: Any = None,
        *,
        ends: LastTokens | None = None,
    ) -> torch.Tensor:
        x = self._fc(torch.cat((self._served.embedding(batch.token_ids), features), dim=1))
        if self._fc_bias is not None:
            x = x + self._fc_bias
        return self._layer.forward(x, x, batch, kv_cache[0], attention_plan, ends)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._served.logits(hidden)
