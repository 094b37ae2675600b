"""Heads with labels over the hidden state of a text's last token, of decoders that classify, and of
those that score by the logits of two tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from ...config import require
from ...weights.model_config import ModelConfig
from .fields import Config

MOST_LABELS = 4096
JUDGED = "yes"
"""Label of a score that is the difference of two tokens' logits."""


def classifier(read: Callable[[Config], ModelConfig]) -> Callable[[Config], ModelConfig]:
    """The reader of a decoder with a head of labels in the place of that of tokens."""

    def read_classifier(config: Config) -> ModelConfig:
        # Nothing reads logits of tokens, so their head shares the embedding's tensor.
        return replace(read({**config, "tie_word_embeddings": True}), labels=labels_of(config))

    return read_classifier


def with_judgement(model: ModelConfig, sentence: Mapping[str, Any]) -> ModelConfig:
    """The model with one label where sentence-transformers' files judge by logits of tokens. Raises
    `ConfigError`."""
    token_ids = sentence.get("logit_tokens")
    if token_ids is None:
        return model
    is_decoder = model.encoder is None and model.foreign is None and not model.labels
    require(is_decoder, "module of modules.json", "LogitScore", "Pooling, Dense, Normalize")
    largest = max(each for each in token_ids if each is not None)
    allowed = f"token ids below {model.vocab_size}"
    require(largest < model.vocab_size, "true_token_id and false_token_id", largest, allowed)
    return replace(model, labels=(JUDGED,))


def labels_of(config: Config) -> tuple[str, ...]:
    """Labels by `id2label`, in the order of their numbers, or as many as `num_labels`."""
    named = config.get("id2label")
    if named is None:
        number = config.get("num_labels", 2)
        named = {str(i): f"LABEL_{i}" for i in range(number if type(number) is int else 0)}
    is_named = isinstance(named, dict) and 1 <= len(named) <= MOST_LABELS
    require(is_named, "id2label", named, f"1…{MOST_LABELS} labels by number")
    numbers = [str(i) for i in range(len(named))]
    by_number = {str(number): str(label) for number, label in named.items()}
    require(sorted(by_number) == sorted(numbers), "id2label", list(named), "0, 1, 2 and so on")
    return tuple(by_number[number] for number in numbers)
