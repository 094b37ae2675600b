"""Configs of decoders that do not generate: those with bidirectional attention, and those that
score by the logits of two tokens."""

from __future__ import annotations

from collections.abc import Callable

from ...weights.encoders.sentence_files import KEY
from ...weights.model_config import ModelConfig
from .both_ways import read_both_ways, sees_both_ways
from .fields import Config
from .labels import with_judgement


def read_task(
    read: Callable[[Config], ModelConfig], config: Config, *, has_both_ways: bool
) -> ModelConfig:
    """The config, with the task that its fields and sentence-transformers' files name.
    `has_both_ways`: whether a bidirectional model of these layers exists. Raises `ConfigError`."""
    if has_both_ways and sees_both_ways(config):
        return read_both_ways(read, config)
    return with_judgement(read(config), config.get(KEY, {}))
