"""Settings of a model beside others of a cluster: the cluster's, but for those that speak of the
first model's own files, and for caches where the model has none."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from .memory_shares import StartedModel
from .model_stages import prefix_of
from .plan import StackPlan
from .settings import StackSettings

OF_THE_FIRST = (
    *("max_model_len", "chat_template", "tool_call_parser", "reasoning_parser"),
    *("generation_config", "profile", "draft_model", "draft_heads", "lora_modules"),
    *("prefill_replicas", "decode_replicas"),
)
"""Settings about the first model's own files, lengths and engines."""
OF_CACHES = (
    *("kv_cache_dtype", "kv_swap_memory", "kv_disk_dir", "kv_disk_memory", "kv_peer_memory"),
    *("adapter_memory", "tensor_parallel_size", "pipeline_parallel_size", "numerics"),
)
"""Settings that encoders refuse: they have no cache, and run in one process."""
_DEFAULTS = {field.name: field.default for field in dataclasses.fields(StackSettings)}


def settings_beside(settings: StackSettings, model: StartedModel) -> StackSettings:
    """Settings of another model than the first."""
    own = dataclasses.replace(settings, **defaults_of(OF_THE_FIRST))
    return own if model.has_cache else without_caches(own)


def plan_beside(
    first: StackPlan, settings: StackSettings, model: StartedModel, taken: set[str], /, **own: Any
) -> StackPlan:
    """Flags of another model than the first, of a cluster with these settings. `taken`: beginnings
    of names of stages; `own`: settings that the model has for itself, `model` among them."""
    return dataclasses.replace(
        first,
        settings=dataclasses.replace(settings_beside(settings, model), **own),
        model_folder=model.folder,
        served_name=model.name,
        prefix=prefix_of(model.name, taken),
    )


def without_caches(settings: StackSettings) -> StackSettings:
    """Settings of an encoder beside models that have caches."""
    return dataclasses.replace(settings, **defaults_of(OF_CACHES))


def left_out(settings: StackSettings, model: StartedModel) -> str:
    """Sentence about flags that are not passed to an encoder; empty: all set flags are."""
    names = [name for name in OF_CACHES if getattr(settings, name) != _DEFAULTS[name]]
    if model.has_cache or not names:
        return ""
    flags = ", ".join(f"--{name.replace('_', '-')}" for name in names)
    return f"{model.name}: without {flags}, which encoders do not have"


def defaults_of(names: Iterable[str]) -> dict[str, Any]:
    """Defaults of settings, by name."""
    return {name: _DEFAULTS[name] for name in names}
