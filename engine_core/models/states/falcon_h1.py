"""The decoder of Falcon-H1: layers with Mamba-2 and attention side by side, which read one norm. A
published layer is two layers here: Mamba-2, and attention with the MLP. Source: TII, "Falcon-H1",
2025."""

from __future__ import annotations

from dataclasses import replace

from ...layers.mlp import NoMlp, ScaledMlp
from ...weights.layout import Layout
from ...weights.model_config import ModelConfig
from .. import layered
from ..decoder import Decoder
from ..layered import FUSED_NAMES
from ..parts import Parts
from .delta_parts import conv_of
from .mamba_parts import TAPS, mamba_names
from .side_by_side import AttentionLayer, MambaLayer, NormedBefore, SharedNorm

MODEL_NAMES = {
    "model.embed_tokens.weight": "embed",
    "model.final_layernorm.weight": "final_norm",
    "lm_head.weight": "lm_head",
}
LAYER_NAMES = {
    "input_layernorm.weight": "input_norm",
    "pre_ff_layernorm.weight": "post_norm",
    "self_attn.o_proj.weight": "o",
    "feed_forward.down_proj.weight": "down",
    **mamba_names("mamba"),
}
GATE_NAMES = {
    "feed_forward.gate_proj.weight": ("gate_up", 0),
    "feed_forward.up_proj.weight": ("gate_up", 1),
}
OF_MAMBA = ("input_layernorm.", "mamba.")
"""Prefixes of names that belong to the first of the two layers."""


def located(number: int, rest: str, layout: Layout) -> tuple[int, str]:
    """See `CheckpointNames.located`."""
    return 2 * number + (not rest.startswith(OF_MAMBA)), rest


class FalconH1(Decoder):
    """See `Model`."""

    names = replace(
        Decoder.names,
        model=MODEL_NAMES,
        layer=LAYER_NAMES,
        fused={**FUSED_NAMES, **GATE_NAMES},
        changed={TAPS: conv_of},
        located=located,
    )
    stage_step = 2

    @classmethod
    def layout(cls, config: ModelConfig) -> Layout:
        spare = {
            f"layers.{i}." + ("input_norm" if config.follows_mixer(i) else "post_norm")
            for i in range(config.num_layers)
        }
        whole = super().layout(config)
        return {name: spec for name, spec in whole.items() if name not in spare}

    @staticmethod
    def adds_products(config: ModelConfig) -> bool:
        return False

    def _layer(self, parts: Parts, i: int) -> layered.Layer:
        multipliers = self.config.multipliers
        assert multipliers is not None
        prefix = f"layers.{i}."
        if not self.config.follows_mixer(i):
            self._shared = SharedNorm(parts.norm(prefix + "input_norm"))
            return MambaLayer(
                input_norm=self._shared,
                attention=parts.mixer(i),
                mlp=NoMlp(),
                scale=multipliers.mamba_out,
            )
        for name in ("qkv", "gate_up", "down"):
            parts.check_unrounded(prefix + name)
        return AttentionLayer(
            input_norm=NormedBefore(self._shared),
            attention=parts.attention(i),
            post_norm=parts.norm(prefix + "post_norm"),
            mlp=ScaledMlp(
                self._platform,
                parts.linear(prefix + "gate_up"),
                parts.linear(prefix + "down"),
                self.config.activation,
                *multipliers.mlp,
            ),
            scale=multipliers.attention_out,
        )
