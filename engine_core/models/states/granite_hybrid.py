"""The decoder of Granite 4 with layers of Mamba-2. Every layer has the MLP that is the shared
expert of a mixture, with experts beside it or without. Source: IBM, "Granite 4.0", 2025."""

from __future__ import annotations

from dataclasses import replace

from ...layers.mlp import Mlp
from ...weights.layout import Layout
from ...weights.model_config import ModelConfig
from ..decoder import Decoder, ScaledLayer
from ..experts.mixture import SHARED_DOWN, SHARED_GATE_UP
from ..parts import Parts
from .delta_parts import conv_of
from .mamba_parts import TAPS, mamba_names

SHARED_NAMES = {
    "shared_mlp.input_linear.weight": SHARED_GATE_UP,
    "shared_mlp.output_linear.weight": SHARED_DOWN,
}
OF_MLP = {"gate_up": SHARED_GATE_UP, "down": SHARED_DOWN}
"""Names of an MLP's weights in layers without experts, by those of other models."""


class GraniteHybrid(Decoder):
    """See `Model`."""

    names = replace(
        Decoder.names,
        layer={**Decoder.names.layer, **mamba_names("mamba"), **SHARED_NAMES},
        changed={TAPS: conv_of},
    )

    @classmethod
    def layout(cls, config: ModelConfig) -> Layout:
        whole = super().layout(config)
        if config.experts is not None:
            return whole
        return {_shared_name(name): spec for name, spec in whole.items()}

    def _layer(self, parts: Parts, i: int) -> ScaledLayer:
        prefix = f"layers.{i}."
        return ScaledLayer(
            input_norm=parts.norm_of_mixer(prefix + "input_norm", i),
            attention=parts.mixer(i),
            post_norm=parts.norm(prefix + "post_norm"),
            mlp=parts.mlp(i) if self.config.has_experts(i) else self._mlp(parts, prefix),
            scale=self.config.residual_scale,
        )

    def _mlp(self, parts: Parts, prefix: str) -> Mlp:
        gate_up, down = (parts.unrounded(prefix + name) for name in OF_MLP.values())
        return Mlp(self._platform, gate_up, down, self.config.activation)


def _shared_name(name: str) -> str:
    prefix, _, own = name.rpartition(".")
    return f"{prefix}.{OF_MLP[own]}" if own in OF_MLP else name
