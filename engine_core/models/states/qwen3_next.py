"""The decoders of Qwen3-Next, Qwen3.5 and Qwen3.6: gated delta nets in most layers, gated attention
in the others. Sources: Qwen Team, "Qwen3-Next", 2025; "Qwen3.5", 2026."""

from __future__ import annotations

from dataclasses import replace

from ..decoder import Decoder
from .delta_parts import CONV, DELTA_NAMES, SPLIT_NAMES, conv_of


class Qwen3Next(Decoder):
    """See `Model`."""

    names = replace(
        Decoder.names, layer={**Decoder.names.layer, **DELTA_NAMES}, changed={CONV: conv_of}
    )


class Qwen35(Qwen3Next):
    """See `Model`: Qwen3-Next's decoder with the projections of gated delta nets by kind."""

    names = replace(Qwen3Next.names, fused={**Qwen3Next.names.fused, **SPLIT_NAMES})
