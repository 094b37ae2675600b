"""A model's limits on requests, and its own default sampling. Knows nothing about requests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

FROM_MODEL = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Fields whose default a model's `generation_config.json` may set, besides `max_new_tokens`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLimits:
    """Limits that a request's parameters are checked against."""

    vocab_size: int
    max_model_len: int
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Defaults of `FROM_MODEL`, and of `max_tokens`, where the model sets them."""


def model_defaults(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """The defaults that a model's `generation_config.json` sets, by our names."""
    defaults = {
        name: generation_config[name]
        for name in FROM_MODEL
        if generation_config.get(name) is not None
    }
    if generation_config.get("max_new_tokens") is not None:
        defaults["max_tokens"] = generation_config["max_new_tokens"]
    return defaults
