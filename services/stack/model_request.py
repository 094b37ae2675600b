"""Requests to a cluster's supervisor about its models, over the bus and in the file of those that
were loaded."""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class ModelRequest(msgspec.Struct, kw_only=True, omit_defaults=True):
    do: str
    """list, load, scale, unload, sleep, wake, pin, unpin or weights."""
    model: str = ""
    """Name or path on this machine of a model to load; in other requests the name that it is served
    under."""
    served_model_name: str = ""
    min_replicas: int | None = None
    max_replicas: int | None = None
    escape_special_tokens: bool = False
    """Whether special tokens in conversations of a loaded model are text, also where the cluster's
    default is otherwise."""
    folder: str = ""
    """Name or path on this machine of the model whose weights replace those of another."""
    ends_requests: bool = False
    """Whether requests end that run or wait when weights are replaced."""
    numerics: Literal["default", "tree"] | None = None
    """Numerics of every engine of a loaded model; None: those of the cluster."""
    settings: dict[str, Any] = msgspec.field(default_factory=dict)
    """Settings of a loaded model alone, by their names: `OF_A_MODEL` of `own_settings.py`."""
