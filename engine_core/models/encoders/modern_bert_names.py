"""Names of ModernBERT's tensors in published checkpoints."""

from __future__ import annotations

from .bert import linear_names

NORM_NAMES = {
    f"model.{published}.{kind}": ours + suffix
    for published, ours in (("embeddings.norm", "embedding_norm"), ("final_norm", "final_norm"))
    for kind, suffix in (("weight", ""), ("bias", "_bias"))
}
MODEL = {"model.embeddings.tok_embeddings.weight": "embed", **NORM_NAMES}
LAYER = {
    **linear_names("attn_norm", "attention_norm"),
    **linear_names("mlp_norm", "mlp_norm"),
    "attn.Wqkv.weight": "qkv",
    "attn.Wo.weight": "o",
    "mlp.Wi.weight": "gate_up",
    "mlp.Wo.weight": "down",
}
PREDICTIONS = (
    *(f"head.{part}.{kind}" for part in ("dense", "norm") for kind in ("weight", "bias")),
    *(f"decoder.{kind}" for kind in ("weight", "bias")),
)
"""Tensors of the head that predicts masked tokens."""
