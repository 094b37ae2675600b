"""Fields and paths of Ollama's API that are not served, each with the reason, and values of fields
that ask for nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headwater.services.runtime.errors import UnsupportedField

TEXT_ONLY = "only text is served"
IN_OPTIONS = "here it is a field of `options`"
OF_CHAT = "it is a field of /v1/chat/completions"
NO_CUT = "a prompt that exceeds the context is refused"
NOT_SERVED = {
    "images": TEXT_ONLY,
    "messages[].images": TEXT_ONLY,
    "context": "/api/chat goes on with a conversation by its messages",
    "template": "the operator chooses the template",
    "truncate": NO_CUT,
    "shift": "an answer ends where the context does",
    "options.mirostat": "tokens are filtered by `top_k`, `top_p` and `min_p`",
    "options.typical_p": "tokens are filtered by `top_k`, `top_p` and `min_p`",
    "options.tfs_z": "tokens are filtered by `top_k`, `top_p` and `min_p`",
    "options.penalize_newline": "penalties hold for all tokens",
    # Names that other endpoints have.
    "max_tokens": "here it is `options.num_predict`",
    "max_completion_tokens": "here it is `options.num_predict`",
    "options.max_tokens": "here it is `options.num_predict`",
    "options.repetition_penalty": "here it is `options.repeat_penalty`",
    "response_format": "here it is `format`",
    "reasoning_effort": "here it is `think`",
    **dict.fromkeys(
        (
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "seed",
            "stop",
            "presence_penalty",
            "frequency_penalty",
        ),
        IN_OPTIONS,
    ),
    **dict.fromkeys(
        ("n", "tool_choice", "logit_bias", "min_tokens", "structured_outputs"), OF_CHAT
    ),
}
HARMLESS: Mapping[str, Any] = {
    "options.typical_p": 1,
    "options.tfs_z": 1,
    "options.penalize_newline": True,
}
"""Values of unsupported fields that change nothing, besides empty values and false."""

NO_DOWNLOADS = "the operator pulls models: `headwater pull` and `headwater up --model`"
NO_CHANGES = "the operator adds and removes models: `headwater models load` and `unload`"
PATHS_NOT_SERVED = {
    "/api/pull": NO_DOWNLOADS,
    "/api/push": "models are not published",
    "/api/create": NO_CHANGES,
    "/api/copy": NO_CHANGES,
    "/api/delete": NO_CHANGES,
    "/api/blobs/{digest}": NO_CHANGES,
}
"""Paths of Ollama's API that change its model store, each with an alternative."""


def check_served(name: str, path: str, value: Any) -> bool:
    """Whether the field is one of these and has a value without effect. Raises `UnsupportedField`
    for another value of the field at `path`, which is `name` with indices."""
    if name not in NOT_SERVED:
        return False
    if value and value != HARMLESS.get(name):
        raise UnsupportedField(path, NOT_SERVED[name])
    # What is on by default may be asked to be off.
    if value is False and HARMLESS.get(name) is True:
        raise UnsupportedField(path, NOT_SERVED[name])
    return True
