"""The encoder of BERT, RoBERTa and XLM-RoBERTa. Sources: Devlin et al., "BERT: pre-training of deep
bidirectional transformers", 2019; Liu et al., "RoBERTa", 2019; Conneau et al., 2020."""

from __future__ import annotations

from ...weights.names import CheckpointNames
from .encoder import Encoder

MOST_DENSE = 8
"""Dense layers behind the pooling that a checkpoint may have."""
TABLES = {
    "model.embeddings.word_embeddings.weight": "embed",
    "model.embeddings.position_embeddings.weight": "positions",
}
IGNORED = (
    ".position_ids",
    "pooler.dense.weight",
    "pooler.dense.bias",
    *(f"lm_head.{part}" for part in ("bias", "decoder.bias", "decoder.weight")),
    *(f"lm_head.{part}.{kind}" for part in ("dense", "layer_norm") for kind in ("weight", "bias")),
)
"""Tensors of heads that predict masked tokens, and of poolers."""


def norm_names(published: str, ours: str) -> dict[str, str]:
    """Names of a norm's factors and biases; old checkpoints call them gamma and beta."""
    return {
        f"{published}.weight": ours,
        f"{published}.bias": f"{ours}_bias",
        f"{published}.gamma": ours,
        f"{published}.beta": f"{ours}_bias",
    }


def linear_names(published: str, ours: str) -> dict[str, str]:
    return {f"{published}.weight": ours, f"{published}.bias": f"{ours}_bias"}


DENSE = {
    published: ours
    for i in range(MOST_DENSE)
    for published, ours in linear_names(f"model.dense.{i}.linear", f"dense.{i}").items()
} | {**linear_names("model.sparse", "sparse"), **linear_names("model.colbert", "colbert")}
LAYER = {
    **linear_names("attention.output.dense", "o"),
    **norm_names("attention.output.LayerNorm", "attention_norm"),
    **linear_names("intermediate.dense", "up"),
    **linear_names("output.dense", "down"),
    **norm_names("output.LayerNorm", "output_norm"),
}
QKV = {
    f"attention.self.{name}.{kind}": (ours, i)
    for kind, ours in (("weight", "qkv"), ("bias", "qkv_bias"))
    for i, name in enumerate(("query", "key", "value"))
}
MODEL = {
    **TABLES,
    "model.embeddings.token_type_embeddings.weight": "types",
    **norm_names("model.embeddings.LayerNorm", "embedding_norm"),
}
PREDICTIONS = (
    *(f"cls.seq_relationship.{kind}" for kind in ("weight", "bias")),
    *(f"cls.predictions.{part}" for part in ("bias", "decoder.weight", "decoder.bias")),
    *(f"cls.predictions.transform.dense.{kind}" for kind in ("weight", "bias")),
    *(
        f"cls.predictions.transform.LayerNorm.{kind}"
        for kind in ("weight", "bias", "gamma", "beta")
    ),
)
"""Tensors of BERT's heads that predict masked tokens and the next sentence."""


class Bert(Encoder):
    """See `Encoder`."""

    names = CheckpointNames(
        model=MODEL | DENSE, layer=LAYER, fused=QKV, ignored=(*IGNORED, *PREDICTIONS)
    )


class BertClassifier(Encoder):
    """See `Encoder`. The pooler and the classifier follow the state of the first token."""

    names = CheckpointNames(
        model={
            **MODEL,
            **linear_names("model.pooler.dense", "dense.0"),
            **linear_names("model.classifier", "dense.1"),
        },
        layer=LAYER,
        fused=QKV,
        ignored=(".position_ids",),
    )


class RobertaClassifier(Encoder):
    """See `BertClassifier`."""

    names = CheckpointNames(
        model={
            **MODEL,
            **linear_names("model.classifier.dense", "dense.0"),
            **linear_names("model.classifier.out_proj", "dense.1"),
        },
        layer=LAYER,
        fused=QKV,
        ignored=(".position_ids",),
    )
