"""A model's tokenizer for clients: its published configuration, with the chat template that is
served."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .model import TextModel

_OF_FILES = frozenset(
    (
        "vocab_file",
        "merges_file",
        "tokenizer_file",
        "special_tokens_map_file",
        "name_or_path",
        "auto_map",
    )
)
"""Entries that name files or code of the model's author."""


def tokenizer_info(model: TextModel) -> dict[str, Any]:
    """Configuration as in vLLM's `GET /tokenizer_info`, with special tokens as text."""
    config = {
        name: _plain(value)
        for name, value in model.tokenizer.config.items()
        if name not in _OF_FILES
    }
    # Transformers' own name of the class that reads a `tokenizer.json`.
    config.setdefault("tokenizer_class", "PreTrainedTokenizerFast")
    config.pop("chat_template", None)
    if model.chat_template is not None:
        config["chat_template"] = model.chat_template.source
    return config


def _plain(value: Any) -> Any:
    """Text of a special token, which may be an object that says how it is found in text."""
    if isinstance(value, Mapping):
        if isinstance(value.get("content"), str):
            return value["content"]
        return {name: _plain(each) for name, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list) else value
