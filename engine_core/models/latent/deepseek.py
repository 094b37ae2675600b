"""Decoders with latent attention: DeepSeek V2 and V3, Kimi K2, GLM-4.7-Flash, MiniCPM 3. Sources:
DeepSeek-AI, "DeepSeek-V2", 2024; "DeepSeek-V3 technical report", 2024."""

from __future__ import annotations

from dataclasses import replace

from ..decoder import Decoder
from .latent_parts import LATENT_NAMES


class DeepSeek(Decoder):
    """See `Model`."""

    names = replace(
        Decoder.names,
        layer={**Decoder.names.layer, **LATENT_NAMES},
        fused={
            name: place
            for name, place in Decoder.names.fused.items()
            if not name.startswith("self_attn.")
        },
    )
