"""The encoder of MPNet, whose attention adds a bias of the distance between two tokens. Source:
Song et al., "MPNet: masked and permuted pre-training for language understanding", 2020."""

from __future__ import annotations

from ...weights.names import CheckpointNames
from .bert import DENSE, IGNORED, TABLES, linear_names, norm_names
from .encoder import Encoder


class MPNet(Encoder):
    """See `Encoder`."""

    names = CheckpointNames(
        model={
            **TABLES,
            "model.encoder.relative_attention_bias.weight": "distances",
            **norm_names("model.embeddings.LayerNorm", "embedding_norm"),
            **DENSE,
        },
        layer={
            **linear_names("attention.attn.o", "o"),
            **norm_names("attention.LayerNorm", "attention_norm"),
            **linear_names("intermediate.dense", "up"),
            **linear_names("output.dense", "down"),
            **norm_names("output.LayerNorm", "output_norm"),
        },
        fused={
            f"attention.attn.{name}.{kind}": (ours, i)
            for kind, ours in (("weight", "qkv"), ("bias", "qkv_bias"))
            for i, name in enumerate("qkv")
        },
        ignored=IGNORED,
    )
