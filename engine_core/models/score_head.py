"""The head of a reranker that judges by the logits of two tokens, as one row of weights. Source:
Qwen3-Reranker's model card, 2025: the probability of `yes` against `no`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from ..config import ConfigError
from ..weights.model_config import ModelConfig
from ..weights.names import Weight, canonical

Published = Iterable[tuple[str, Weight]]
"""Tensors of a checkpoint by their names there."""
SCORE = "score.weight"


def with_score_head(
    published: Published, config: ModelConfig, sentence: Mapping[str, Any]
) -> Iterator[tuple[str, Weight]]:
    """The tensors, and the row by which the model scores, made of its head of tokens where
    sentence-transformers' files name two of these. The difference of two logits is the product with
    the difference of their rows. Raises `ConfigError` for a head that is packed."""
    token_ids = sentence.get("logit_tokens")
    source = "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
    for name, tensor in published:
        yield name, tensor
        if token_ids is not None and canonical(name) == source:
            yield SCORE, _row(name, tensor, *token_ids)


def _row(name: str, head: Weight, true_id: int, false_id: int | None) -> torch.Tensor:
    """float32 [1, H]"""
    if not (isinstance(head, torch.Tensor) and head.is_floating_point()):
        raise ConfigError("checkpoint tensor", name, "a head that is not packed, to score with")
    row = head[true_id].float()
    return (row if false_id is None else row - head[false_id].float()).unsqueeze(0)
