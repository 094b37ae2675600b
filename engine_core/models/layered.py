"""The pass over a decoder's layers, whatever these compute behind their attention, and the weights
that all have."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ..executor import Int32Array
from ..layers.batch import ForwardBatch, LayerCaches, last_tokens
from ..layers.experts import Experts
from ..layers.linear.kinds import Weights
from ..layers.mixers.mixer import Mixer
from ..layers.mlp import Mlp, NoMlp, PlainMlp, ScaledMlp
from ..layers.norm import Norm
from ..layers.platform import Platform, plans_of
from ..weights.layout import Layout
from ..weights.model_config import ModelConfig
from .layer_layout import layout_of
from .model import LastNorm, LastTokens, LayerInputs
from .parts import Parts

MODEL_NAMES = {
    "model.embed_tokens.weight": "embed",
    "model.norm.weight": "final_norm",
    "lm_head.weight": "lm_head",
    "score.weight": "score",
}
LAYER_NAMES = {
    "self_attn.o_proj.weight": "o",
    "self_attn.o_proj.bias": "o_bias",
    "self_attn.sinks": "sinks",
    "self_attn.attention_sink_bias": "sinks",
    "self_attn.q_norm.weight": "q_norm",
    "self_attn.k_norm.weight": "k_norm",
    "mlp.down_proj.weight": "down",
    "mlp.down_proj.bias": "down_bias",
}
JOINED_NAMES = {
    "self_attn.qkv_proj.weight": "qkv",
    "self_attn.qkv_proj.bias": "qkv_bias",
    "mlp.gate_up_proj.weight": "gate_up",
    "mlp.gate_up_proj.bias": "gate_up_bias",
}
UNCHANGED_NAMES = {
    f"{theirs}.{kind}": ours + suffix
    for theirs, ours in (
        ("self_attn.qkv_proj", "qkv"),
        ("self_attn.o_proj", "o"),
        ("mlp.up_proj", "up"),
        ("mlp.down_proj", "down"),
    )
    for kind, suffix in (("weight", ""), ("bias", "_bias"))
}
FUSED_NAMES = {
    "self_attn.q_proj.weight": ("qkv", 0),
    "self_attn.k_proj.weight": ("qkv", 1),
    "self_attn.v_proj.weight": ("qkv", 2),
    "mlp.gate_proj.weight": ("gate_up", 0),
    "mlp.up_proj.weight": ("gate_up", 1),
}
FUSED_BIASES = {
    "self_attn.q_proj.bias": ("qkv_bias", 0),
    "self_attn.k_proj.bias": ("qkv_bias", 1),
    "self_attn.v_proj.bias": ("qkv_bias", 2),
    "mlp.gate_proj.bias": ("gate_up_bias", 0),
    "mlp.up_proj.bias": ("gate_up_bias", 1),
}
"""Published names of tensors, and of parts of a tensor; see `CheckpointNames`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer(ABC):
    input_norm: Norm
    attention: Mixer
    mlp: Mlp | PlainMlp | ScaledMlp | NoMlp | Experts

    @property
    def experts(self) -> Experts | None:
        """The layer's experts; None: it has none."""
        return self.mlp if isinstance(self.mlp, Experts) else None

    @abstractmethod
    def behind_attention(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Adds what attention made of the layer's input, x, to the residual stream in place;
        returns what the next norm adds to it."""


class LayeredModel(ABC):
    """See `Model`."""

    layer_norms: ClassVar[tuple[str, ...]]
    """Names of norms [H] of a layer."""
    reads_page_groups = True
    stage_step: ClassVar[int] = 1
    """Number of layers that stay together in one pipeline stage."""
    final_norm: LastNorm
    score_head: torch.Tensor | None
    """float32 [N, H] of a model that classifies: from the state of a text's last token to the
    scores of N labels."""

    def __init__(
        self, config: ModelConfig, weights: Weights, platform: Platform, max_model_len: int
    ) -> None:
        parts = Parts(config, weights, platform, max_model_len)
        self.config = config
        self._platform = platform
        self._adapters = weights.adapters
        self._positions = parts.positions()
        self._vectors = parts.layer_vectors
        self.expert_counts = None if config.experts is None else parts.expert_counts
        self.embedding = parts.embedding()
        self.dtype = self.embedding.dtype
        self.layers = [self._layer(parts, i) for i in range(config.num_layers)]
        self.final_norm = self._final_norm(parts)
        self.lm_head = parts.lm_head()
        self.score_head = weights.tensors.get("score")

    @property
    def expert_bytes(self) -> list[int]:
        """Bytes of the weights of one expert of each layer; 0: it has none."""
        found = [layer.experts for layer in self.layers]
        return [0 if experts is None else experts.expert_bytes for experts in found]

    @abstractmethod
    def _layer(self, parts: Parts, i: int) -> Layer:
        """Layer i of the model."""

    def _final_norm(self, parts: Parts) -> LastNorm:
        return parts.norm("final_norm")

    @classmethod
    def layout(cls, config: ModelConfig) -> Layout:
        return layout_of(config, cls.layer_norms)

    @staticmethod
    def adds_products(config: ModelConfig) -> bool:
        """False where a norm, a bias or a factor stands between a product and the residual
        stream."""
        return False

    def forward(
        self,
        batch: ForwardBatch,
        kv_cache: LayerCaches,
        attention_plan: Any = None,
        *,
        ends: LastTokens | None = None,
        num_layers: int | None = None,
        inputs: LayerInputs | None = None,
    ) -> torch.Tensor:
        last = len(self.layers) - 1
        plans = attention_plan or plans_of(self._platform, batch)
        self._adapters.begin(batch.adapter_of_row)
        residual = self.embedding(batch.token_ids)
        if self._positions is not None:
            residual = self._positions.add_to(residual, batch.positions)
        self._vectors.begin(batch.token_ids, residual)
        x = self.layers[0].input_norm(residual)
        for i in range(last + 1) if num_layers is None else self._some_layers(num_layers):
            layer = self.layers[i]
            if inputs is not None:
                inputs.take(i, residual)
            plan = plans[batch.group_of_layer[i]] if batch.page_groups else plans
            queries = layer.attention.queries(x, batch.of_layer(i), kv_cache[i])
            if i == last and ends is not None:
                if not len(ends.tokens):
                    return residual[:0]
                self._adapters.keep(ends.tokens)
                self._vectors.keep(ends.tokens)
                queries = layer.attention.kept(queries, ends.tokens)
                residual = residual.index_select(0, ends.tokens)
                plan = ends.attention_plan
            x = layer.behind_attention(layer.attention.attend(queries, kv_cache[i], plan), residual)
            x = (self.final_norm if i == last else self.layers[i + 1].input_norm).add(x, residual)
        # Only norms before linear layers round their results, and the last one has none behind it.
        assert isinstance(x, torch.Tensor)
        return x

    def ends(self, batch: ForwardBatch, num_wanted: Int32Array) -> LastTokens:
        own = last_tokens(batch.of_layer(len(self.layers) - 1), num_wanted)
        return LastTokens(own.sampled, self._platform.plan_attention(own, of_ends=True))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.lm_head(hidden)

    def _some_layers(self, num_layers: int) -> Iterable[int]:
        """Layers of a shortened pass that launches every kernel of a whole pass, in order: the
        first ones, one of each kind (window, full attention, state; own keys and values or shared
        ones), and the last, with the one that chooses for it."""
        config = self.config
        last = len(self.layers) - 1
        kinds = [
            (config.window_of(i), config.has_state(i), config.kv_layer(i) == i)
            for i in range(last + 1)
        ]
        firsts = {kinds.index(kind) for kind in set(kinds)}
        index = config.index
        chooses = last if index is None else index.layer_of(last)
        return sorted({*range(min(num_layers - 1, last)), *firsts, chooses, last})
