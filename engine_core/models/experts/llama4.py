"""The text model of Llama 4. Source: Meta, "The Llama 4 herd", 2025."""

from __future__ import annotations

from dataclasses import replace

from ..decoder import Decoder
from .mixture import (
    DOWN,
    GATE_UP,
    ROUTER,
    SHARED_DOWN,
    SHARED_GATE_UP,
    outputs_first,
)

_MLP = "feed_forward"


class Llama4(Decoder):
    """See `Model`."""

    names = replace(
        Decoder.names,
        layer={
            **Decoder.names.layer,
            f"{_MLP}.router.weight": ROUTER,
            f"{_MLP}.experts.gate_up_proj": GATE_UP,
            f"{_MLP}.experts.down_proj": DOWN,
            f"{_MLP}.shared_expert.down_proj.weight": SHARED_DOWN,
            f"{_MLP}.down_proj.weight": "down",
        },
        fused={
            **Decoder.names.fused,
            f"{_MLP}.shared_expert.gate_proj.weight": (SHARED_GATE_UP, 0),
            f"{_MLP}.shared_expert.up_proj.weight": (SHARED_GATE_UP, 1),
            f"{_MLP}.gate_proj.weight": ("gate_up", 0),
            f"{_MLP}.up_proj.weight": ("gate_up", 1),
        },
        changed={GATE_UP: outputs_first, DOWN: outputs_first},
    )
