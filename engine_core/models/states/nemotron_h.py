"""The decoder of Nemotron-H and Nemotron 3: Mamba-2, attention without positions, MLPs and mixtures
of experts of squared relu. Source: NVIDIA, "Nemotron-H", 2025."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...layers.mlp import NoMlp
from ...weights.layout import Layout
from ...weights.model_config import ModelConfig
from ...weights.names import CheckpointNames
from .. import layered
from ..decoder import Decoder
from ..experts.mixture import CORRECTION, DOWN, ROUTER, SHARED_DOWN, SHARED_UP, UP
from ..parts import Parts
from .delta_parts import conv_of
from .mamba_parts import TAPS, mamba_names

MODEL_NAMES = {
    "model.embeddings.weight": "embed",
    "model.norm_f.weight": "final_norm",
    "lm_head.weight": "lm_head",
}
LAYER_NAMES = {
    "norm.weight": "input_norm",
    "post.norm.weight": "post_norm",
    "mixer.o_proj.weight": "o",
    "mixer.up_proj.weight": "up",
    "mixer.down_proj.weight": "down",
    "mixer.gate.weight": ROUTER,
    "mixer.gate.e_score_correction_bias": CORRECTION,
    "mixer.experts.up_proj": UP,
    "mixer.experts.down_proj": DOWN,
    "mixer.shared_experts.up_proj.weight": SHARED_UP,
    "mixer.shared_experts.down_proj.weight": SHARED_DOWN,
    **mamba_names("mixer"),
}
FUSED_NAMES = {f"mixer.{name}_proj.weight": ("qkv", i) for i, name in enumerate("qkv")}
POST_NORM = "post_norm"


@dataclass(frozen=True, slots=True, kw_only=True)
class MixerLayer(layered.Layer):
    """A layer of a mixer alone."""

    def behind_attention(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return x


def located(number: int, rest: str, layout: Layout) -> tuple[int, str]:
    """Our layer for a published layer, which is its mixer or the part after it, and the name with
    the latter's norm renamed. See `CheckpointNames.located`."""
    first = 0
    layer = 0
    while f"layers.{layer}.input_norm" in layout:
        size = 2 if f"layers.{layer}.{POST_NORM}" in layout else 1
        if number < first + size:
            is_inner = number > first
            return layer, "post." + rest if is_inner and rest == "norm.weight" else rest
        first += size
        layer += 1
    return number, rest


class NemotronH(Decoder):
    """See `Model`."""

    names = CheckpointNames(
        model=MODEL_NAMES,
        layer=LAYER_NAMES,
        fused=FUSED_NAMES,
        experts={"up_proj.weight": (UP, 0), "down_proj.weight": (DOWN, 0)},
        changed={TAPS: conv_of},
        located=located,
    )

    @classmethod
    def layout(cls, config: ModelConfig) -> Layout:
        spare = {
            f"layers.{i}.{POST_NORM}"
            for i in range(config.num_layers)
            if not config.follows_mixer(i)
        }
        whole = super().layout(config)
        return {name: spec for name, spec in whole.items() if name not in spare}

    @staticmethod
    def adds_products(config: ModelConfig) -> bool:
        return False

    def _layer(self, parts: Parts, i: int) -> layered.Layer:
        if self.config.follows_mixer(i):
            return super()._layer(parts, i)
        return MixerLayer(
            input_norm=parts.norm_of_mixer(f"layers.{i}.input_norm", i),
            attention=parts.mixer(i),
            mlp=NoMlp(),
        )
