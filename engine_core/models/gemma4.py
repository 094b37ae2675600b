"""The decoder of Gemma 4: that of Gemma 3 with heads of two sizes, layers that read the keys and
values of others, a vector of each token for each layer, or experts beside the MLP. Source:
transformers, `modeling_gemma4.py`."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ..layers.experts import Experts, ExpertsBesideMlp
from ..layers.layer_vectors import LayerVector
from ..layers.norm import ScaledNorm
from ..weights.layout import Layout, WeightSpec, linear, norm, table
from ..weights.model_config import ModelConfig
from . import gemma3
from .experts import mixture
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
    vector: LayerVector | None
    beside_mlp: ExpertsBesideMlp | None

    @property
    def experts(self) -> Experts | None:
        return None if self.beside_mlp is None else self.beside_mlp.experts

    def behind_attention(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        made = self.mlp(self.mlp_input_norm.add(self.attention_norm(x), residual))
        if self.beside_mlp is not None:
            made = self.beside_mlp(made, residual)
        made = self.mlp_norm(made)
        return made if self.vector is None else self.vector(residual.add_(made))


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
            "router.proj.weight": mixture.ROUTER,
            "router.scale": mixture.ROUTER_NORM,
            "router.per_expert_scale": mixture.EXPERT_SCALES,
            "experts.gate_up_proj": mixture.GATE_UP,
            "experts.down_proj": mixture.DOWN,
            "post_feedforward_layernorm_1.weight": mixture.DENSE_NORM,
            "pre_feedforward_layernorm_2.weight": mixture.EXPERTS_INPUT_NORM,
            "post_feedforward_layernorm_2.weight": mixture.EXPERTS_NORM,
        },
        experts=mixture.EXPERT_NAMES,
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

    def _layer(self, parts: Parts, i: int) -> Layer:
        of_layer = self._parts_of(parts, i)
        if i:
            # The layer before multiplies the residual stream.
            factor = parts.scalar(f"layers.{i - 1}.scalar")
            of_layer["input_norm"] = ScaledNorm(of_layer["input_norm"], factor)
        experts = parts.experts_beside_mlp(i)
        beside_mlp = None if experts is None else experts.beside_mlp()
        return Layer(**of_layer, vector=parts.layer_vector(i), beside_mlp=beside_mlp)

    def _final_norm(self, parts: Parts) -> LastNorm:
        last = parts.norm("final_norm")
        return ScaledNorm(last, parts.scalar(f"layers.{self.config.num_layers - 1}.scalar"))
