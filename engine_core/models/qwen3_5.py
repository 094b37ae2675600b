"""The decoder of Qwen3.5 and Qwen3.6: Qwen3-Next's, with the projections of gated delta nets by kind.
Source: Qwen Team, "Qwen3.5", 2026."""

from __future__ import annotations

from dataclasses import replace

from .delta_parts import SPLIT_NAMES
from .qwen3_next import Qwen3Next


class Qwen35(Qwen3Next):
    """See `Model`."""

    names = replace(Qwen3Next.names, fused={**Qwen3Next.names.fused, **SPLIT_NAMES})
