"""Small random decoders that score pairs: with a head of labels, and with that of tokens."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

SHAPE = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
}
PLAIN = {name: value for name, value in SHAPE.items() if name != "head_dim"}
DECODING_CLASSIFIERS: dict[str, Callable[[], Any]] = {
    "gemma2": lambda: transformers.Gemma2Config(
        **SHAPE, num_labels=1, architectures=["Gemma2ForSequenceClassification"]
    ),
    "llama": lambda: transformers.LlamaConfig(
        **PLAIN, num_labels=1, architectures=["LlamaForSequenceClassification"]
    ),
    "mistral": lambda: transformers.MistralConfig(
        **SHAPE, num_labels=2, architectures=["MistralForSequenceClassification"]
    ),
    "qwen2": lambda: transformers.Qwen2Config(
        **PLAIN, num_labels=1, architectures=["Qwen2ForSequenceClassification"]
    ),
    "qwen3": lambda: transformers.Qwen3Config(
        **SHAPE, num_labels=3, architectures=["Qwen3ForSequenceClassification"]
    ),
}
"""Decoders with a head of labels, by family."""


def random_decoding_classifier(family: str, folder: Path) -> Any:
    """Writes one as transformers does; returns its model."""
    config = DECODING_CLASSIFIERS[family]()
    return _written(transformers.AutoModelForSequenceClassification.from_config(config), folder)


def random_judge(folder: Path, *, is_tied: bool = True) -> Any:
    """As Qwen3-Reranker is published: a model of tokens, without a word of how it scores."""
    config = transformers.Qwen3Config(**SHAPE, tie_word_embeddings=is_tied)
    return _written(transformers.AutoModelForCausalLM.from_config(config), folder)


def write_logit_score(folder: Path, true_id: int, false_id: int | None) -> None:
    """Files of sentence-transformers that say by which tokens a model of tokens scores."""
    kinds = (("base.modules.transformer.Transformer", ""),)
    kinds += (("cross_encoder.modules.logit_score.LogitScore", "1_LogitScore"),)
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.{kind}"}
        for i, (kind, path) in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_LogitScore").mkdir()
    config = {"true_token_id": true_id, "false_token_id": false_id}
    (folder / "1_LogitScore" / "config.json").write_text(json.dumps(config))


def _written(model: Any, folder: Path) -> Any:
    torch.manual_seed(0)
    model = model.eval().float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(mean=float(parameter.dim() == 1), std=0.3)
    model.save_pretrained(folder)
    return model
