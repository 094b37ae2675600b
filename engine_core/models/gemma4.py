"""The decoder of Gemma 4: that of Gemma 3 with heads of two sizes, layers that read the keys and
values of others, and a vector of each token for each layer. Source: transformers,
`modeling_gemma4.py`."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ..layers.layer_vectors import LayerVector
from ..layers.norm import ScaledNorm
from ..weights.layout import Layout, WeightSpec, linear, norm, table
from ..weights.model_config import ModelConfig
from . import gemma3
from .gemma3 import Gemma3
from .model import LastNorm
from .parts import Parts

VECTOR_NAMES = {
    "model.embed_tokens_per_layer.weight": "layer_table",
    "model.per_layer_model_projection.weight": "layer_projection",
    "model.per_layer_projection_norm.weight": "layer_projection_norm",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer(gemma3.Layer):
    vector: LayerVector

    def behind_attention(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        # Named, since slots leave `super` without its class.
        return self.vector(residual.add_(gemma3.Layer.behind_attention(self, x, residual)))


class Gemma4(Gemma3):
    """See `Model`."""

    names = replace(
        Gemma3.names,
        model={**Gemma3.names.model, **VECTOR_NAMES},
        layer={
            **Gemma3.names.layer,
            "layer_scalar": "scalar",
            "layer_scalar.weight": "scalar",
            "per_layer_input_gate.weight": "vector_gate",
            "per_layer_projection.weight": "vector_projection",
            "post_per_layer_input_norm.weight": "vector_norm",
        },
        # Published files have projections and norms of keys and values that are not made.
        spare=("qkv", "k_norm"),
    )

    @classmethod
    def layout(cls, config: ModelConfig) -> Layout:
        layout = dict(super().layout(config))
        assert config.mixed is not None
        size = config.mixed.input_size
        hidden = config.hidden_size
        if size:
            width = config.num_layers * size
            layout["layer_table"] = table(config.mixed.num_inputs, width)
            layout["layer_projection"] = linear(width, hidden)
            layout["layer_projection_norm"] = norm(size)
        for i in range(config.num_layers):
            of_layer: dict[str, WeightSpec] = {"scalar": norm(1)}
            if size:
                of_layer["vector_gate"] = linear(size, hidden)
                of_layer["vector_projection"] = linear(hidden, size)
                of_layer["vector_norm"] = norm(hidden)
            layout |= {f"layers.{i}.{name}": spec for name, spec in of_layer.items()}
        return layout

    def _layer(self, parts: Parts, i: int) -> gemma3.Layer:
        of_layer = self._parts_of(parts, i)
        if i:
            # The layer before multiplies the residual stream.
            factor = parts.scalar(f"layers.{i - 1}.scalar")
            of_layer["input_norm"] = ScaledNorm(of_layer["input_norm"], factor)
        vector = parts.layer_vector(i)
        return gemma3.Layer(**of_layer) if vector is None else Layer(**of_layer, vector=vector)

    def _final_norm(self, parts: Parts) -> LastNorm:
        last = parts.norm("final_norm")
        return ScaledNorm(last, parts.scalar(f"layers.{self.config.num_layers - 1}.scalar"))
