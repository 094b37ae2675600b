"""Configs of Phi-3, Phi-3.5, Phi-4 and Phi-4-mini."""

from __future__ import annotations

from typing import Any

from ...config import require
from ...weights.model_config import ModelConfig
from ...weights.rope.config import mapping_of
from .fields import Config, kinds_of_layers, windows


def read_phi3(config: Config) -> ModelConfig:
    kinds = kinds_of_layers(config, lambda i: True)
    read = ModelConfig.from_hf(
        _with_long_positions(config), rotates_parts=True, **windows(config, kinds)
    )
    if (scaling := read.rope_scaling) is not None and scaling["rope_type"] == "longrope":
        num_pairs = (read.rotary_dim or read.head_dim) // 2
        for name in ("short_factor", "long_factor"):
            found = len(scaling[name])
            require(
                found == num_pairs, f"{name} of rope_scaling", f"{found} numbers", str(num_pairs)
            )
    return read


def _with_long_positions(config: Config) -> dict[str, Any]:
    """`yarn` is an old name of `longrope` in this family."""
    changed = dict(config)
    for field in ("rope_scaling", "rope_parameters"):
        rope = mapping_of(config, field)
        if "long_factor" in rope and rope.get("rope_type", rope.get("type")) == "yarn":
            changed[field] = {**rope, "rope_type": "longrope", "type": "longrope"}
    return changed
