"""Config of MiniCPM 3, with three multipliers."""

from __future__ import annotations

import math

from ....weights.model_config import ModelConfig, size_of
from ....weights.rope.config import positive_of
from ..fields import Config
from .fields import read_latent


def read_minicpm3(config: Config) -> ModelConfig:
    hidden = size_of(config, "hidden_size")
    depth = math.sqrt(size_of(config, "num_hidden_layers"))
    heads = size_of(config, "num_attention_heads")
    with_values = {**config, "v_head_dim": config.get("v_head_dim") or hidden // heads}
    return read_latent(
        {"tie_word_embeddings": True, **with_values},
        embedding_scale=positive_of(config, "scale_emb", 1.0),
        residual_scale=positive_of(config, "scale_depth", depth) / depth,
        logit_scale=positive_of(config, "dim_model_base", hidden) / hidden,
    )
