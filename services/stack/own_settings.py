"""Settings that a model has for itself, beside others of a cluster: by name, as flags of
`headwater up`, in a request that loads it."""

from __future__ import annotations

import dataclasses
import typing
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from ..runtime.settings import A_NUMBER, A_WHOLE_NUMBER, TRUE_OR_FALSE, SettingError, require
from .model_request import ModelRequest
from .settings import StackSettings
from .settings_beside import OF_THE_FIRST, defaults_of

OF_A_MODEL = (
    *("revision", "dtype", "load_format", "quantization", "calibration", "model_code"),
    *("kv_cache_dtype", "activation_dtype", "speculation", "draft_model", "draft_heads"),
    *("numerics", "tensor_parallel_size", "expert_parallel", "pipeline_parallel_size"),
    *("eviction", "kv_swap_memory", "kv_disk_dir", "kv_disk_memory"),
    *("kv_peer_memory", "kv_peer_direct", "adapter_memory", "adapter_host_memory"),
    *("lora_modules", "gpu_memory_utilization", "max_model_len", "chat_template"),
    *("trust_request_chat_template", "tool_call_parser", "reasoning_parser"),
    *("generation_config", "escape_special_tokens", "close_schemas"),
)
"""Settings that models of one cluster may have each for itself. Names and numbers of replicas are
fields of the request; addresses, keys, the device and numbers of text stages are the cluster's."""
FILES = ("chat_template", "generation_config", "kv_disk_dir", "calibration")
"""Settings that name files of the supervisor's user. Without administrators' keys, every user of
the machine can load a model, and may not read these files by it."""


ALLOWED = {
    "boolean": TRUE_OR_FALSE,
    "number": A_NUMBER,
    "whole": A_WHOLE_NUMBER,
    "list": "a list of texts",
    "path": "a path",
    "text": "a text",
}
"""Values of the settings of each kind, as errors name them."""


def own_settings(request: ModelRequest) -> dict[str, Any]:
    """Settings of the request for its model alone. Raises `SettingError` for an unknown name, and
    for a value of another type."""
    own = {name: _converted(name, value) for name, value in request.settings.items()}
    if request.escape_special_tokens:
        own["escape_special_tokens"] = True
    if request.numerics is not None:
        own["numerics"] = request.numerics
    return own


def settings_to_pull(
    settings: StackSettings, request: ModelRequest, own: dict[str, Any]
) -> StackSettings:
    """Settings of a model before it is known what it is. Raises `SettingError` for values that
    `headwater up` refuses too, and for files where administrators have no keys."""
    for name in FILES:
        if own.get(name) is not None and not settings.has_admins:
            allowed = "none where administrators have no keys (--admin-key-file)"
            raise SettingError(name, str(own[name]), allowed)
    alone: dict[str, Any] = {"model": (request.model,), "served_model_name": None, "revision": None}
    return dataclasses.replace(settings, **(defaults_of(OF_THE_FIRST) | alone | own))


def _converted(name: str, value: Any) -> Any:
    require(name in OF_A_MODEL, "settings", name, ", ".join(OF_A_MODEL))
    try:
        converted = msgspec.convert(value, _kinds()[name], dec_hook=_path)
    except (msgspec.ValidationError, TypeError):
        raise SettingError(name, value, ALLOWED[kind_of(name)]) from None
    # It becomes part of command lines and of paths.
    require(str(converted).isprintable(), name, value, "printable text")
    return converted


def kind_of(name: str) -> str:
    """Kind of a setting's values: a key of `ALLOWED`."""
    hint = _kinds()[name]
    if typing.get_origin(hint) is tuple:
        return "list"
    parts = set(typing.get_args(hint) or (hint,))
    kinds = {bool: "boolean", float: "number", int: "whole", Path: "path"}
    return next((kind for known, kind in kinds.items() if known in parts), "text")


@cache
def _kinds() -> dict[str, Any]:
    return typing.get_type_hints(StackSettings)


def _path(kind: type, value: Any) -> Path:
    """Raises `TypeError`."""
    if kind is not Path or not isinstance(value, str):
        raise TypeError("a path")
    try:
        return Path(value).expanduser().absolute()
    except RuntimeError as fault:
        raise TypeError(str(fault)) from None
