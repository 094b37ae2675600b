"""Names of NomicBERT's tensors in checkpoints: those of transformers, and those of the model's
first publication."""

from __future__ import annotations

from ...weights.names import CheckpointNames
from .bert import DENSE, IGNORED, norm_names

NAMES = CheckpointNames(
    model={
        "model.embeddings.word_embeddings.weight": "embed",
        "model.embeddings.token_type_embeddings.weight": "types",
        **norm_names("model.embeddings.LayerNorm", "embedding_norm"),
        **norm_names("model.emb_ln", "embedding_norm"),
        **DENSE,
    },
    layer={
        "self_attn.o_proj.weight": "o",
        "attn.out_proj.weight": "o",
        "mlp.down_proj.weight": "down",
        "mlp.fc2.weight": "down",
        **norm_names("post_attention_layernorm", "attention_norm"),
        **norm_names("norm1", "attention_norm"),
        **norm_names("post_mlp_layernorm", "output_norm"),
        **norm_names("norm2", "output_norm"),
    },
    fused={
        "self_attn.q_proj.weight": ("qkv", 0),
        "self_attn.k_proj.weight": ("qkv", 1),
        "self_attn.v_proj.weight": ("qkv", 2),
        "mlp.gate_proj.weight": ("gate_up", 0),
        "mlp.fc12.weight": ("gate_up", 0),
        "mlp.up_proj.weight": ("gate_up", 1),
        "mlp.fc11.weight": ("gate_up", 1),
    },
    joined={"attn.Wqkv.weight": "qkv"},
    ignored=IGNORED,
)
