"""Hides the spellings of special tokens from llguidance, which would otherwise take their text in a
grammar for the tokens.

Where a grammar forces a text, llguidance reads it by the tokenizer and allows only the first token
of that reading. For a text such as `<|im_end|>` that is the special token, which its own parser
then refuses. Special tokens are named by their ids in grammars, so that their spelling is not
needed.
"""

from __future__ import annotations

import secrets
from typing import Any

import msgspec


def without_spellings(tokenizer_json: bytes) -> str:
    """The tokenizer with random texts in place of the special tokens'; ids stay the same."""
    tokenizer: dict[str, Any] = msgspec.json.decode(tokenizer_json)
    # Random, so that no client's grammar contains it.
    prefix = secrets.token_hex(16)
    spelled = {
        token["content"]: f"<{prefix}-{token['id']}>"
        for token in tokenizer.get("added_tokens", [])
        if is_special(token["content"], is_marked=token.get("special", False))
    }
    for token in tokenizer.get("added_tokens", []):
        token["content"] = spelled.get(token["content"], token["content"])
    model = tokenizer["model"]
    if isinstance(model["vocab"], dict):
        model["vocab"] = {spelled.get(text, text): at for text, at in model["vocab"].items()}
    else:
        model["vocab"] = [[spelled.get(text, text), score] for text, score in model["vocab"]]
    if model.get("unk_token") in spelled:
        model["unk_token"] = spelled[model["unk_token"]]
    return msgspec.json.encode(tokenizer).decode()


def is_special(text: str, *, is_marked: bool) -> bool:
    """Whether an added token is no text to llguidance: it takes tags for special tokens, whether or
    not the tokenizer marks them."""
    return is_marked or (text.startswith("<") and text.endswith(">"))
