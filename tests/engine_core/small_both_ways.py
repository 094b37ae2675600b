"""Small random decoders whose tokens see each other both ways, as transformers writes them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.engine_core.small_rerankers import SHAPE

WINDOW = 40
BOTH_WAYS: dict[str, Callable[[], Any]] = {
    "gte-qwen2": lambda: transformers.Qwen2Config(
        **{name: value for name, value in SHAPE.items() if name != "head_dim"}, is_causal=False
    ),
    "embeddinggemma": lambda: transformers.Gemma3TextConfig(
        **SHAPE | {"num_hidden_layers": 4},
        query_pre_attn_scalar=32,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"] * 2,
        use_bidirectional_attention=True,
    ),
}
"""By family."""


def random_both_ways(family: str, folder: Path) -> Any:
    """Writes one; returns transformers' model."""
    torch.manual_seed(0)
    model = transformers.AutoModel.from_config(BOTH_WAYS[family]()).eval().float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(mean=float(parameter.dim() == 1) * 0.5, std=0.2)
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    if config.get("use_bidirectional_attention"):
        # transformers halves the window as it reads a config, and writes what it made of it.
        config["sliding_window"] = WINDOW
        (folder / "config.json").write_text(json.dumps(config))
    return model
