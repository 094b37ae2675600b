"""The decoder of Falcon-H1: layers with Mamba-2 and attention side by side, which read one norm. A
published layer is two layers here: Mamba-2, and attention with the MLP. Source: TII, "Falcon-H1",
2025."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ...layers.linear.linear import Tokens
from ...layers.mlp import NoMlp, ScaledMlp
from ...layers.norm import Norm
from ...weights.layout import Layout
from ...weights.model_config import ModelConfig
from .. import layered
from ..decoder import Decoder
from ..layered import FUSED_NAMES
from ..parts import Parts
from .delta_parts import conv_of
from .mamba_parts import TAPS, mamba_names

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
"""Beginnings of names that are those of the first of two layers."""


class SharedNorm:
    """The norm of Mamba-2's input, which attention reads, too."""

    def __init__(self, norm: Norm) -> None:
        self._norm = norm
        self._normed: Tokens | None = None

    def __call__(self, x: torch.Tensor) -> Tokens:
        """x [T, H] → [T, H]"""
        self._normed = self._norm(x)
        return self._normed

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> Tokens:
        """residual += x in place; the norm of the sum, [T, H]."""
        self._normed = self._norm.add(x, residual)
        return self._normed

    def take(self) -> Tokens:
        """The last result; it is kept no longer."""
        assert self._normed is not None
        normed, self._normed = self._normed, None
        return normed


class NormedBefore:
    """The place of the norm of attention's input: adds to the residual stream, and returns what the
    norm of Mamba-2's input made before that."""

    def __init__(self, shared: SharedNorm) -> None:
        self._shared = shared

    def __call__(self, x: torch.Tensor) -> Tokens:
        """x [T, H] → [T, H]"""
        return self._shared.take()

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> Tokens:
        """residual += x in place; [T, H]."""
        residual += x
        return self._shared.take()


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaLayer(layered.Layer):
    scale: float

    def behind_attention(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return x * self.scale


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionLayer(layered.Layer):
    post_norm: Norm
    scale: float

    def behind_attention(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return self.mlp(self.post_norm.add(x * self.scale, residual))


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
