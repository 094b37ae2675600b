"""The library transformers: which of its architectures have a causal decoder, and their modules
without numbers. Knows nothing of checkpoints or devices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import nn

from ...config import ConfigError, require
from .interface import register
from .version import transformers_version

EXTRA = "headwater[transformers]"
BASE = "Model"
"""Ending of the names of models without a head."""
LEAST = (5, 0)
"""First release with the interfaces that are used here."""


def transformers_of(asked_by: str, value: object) -> ModuleType:
    """Imports the library. Raises `ConfigError` about the field that needs it, where it is not
    installed or too old."""
    found = transformers_version()
    is_new = found and tuple(map(int, found.split(".")[:2])) >= LEAST
    wanted = f"transformers {LEAST[0]} or later"
    allowed = f"a model with code of Headwater, or {wanted}: pip install '{EXTRA}'"
    require(is_new, asked_by, value, allowed)
    register()
    return import_module("transformers")


def class_name(hf_config: Mapping[str, Any]) -> str:
    """Name of the library's class for causal decoding of a config's `model_type`; empty: it has
    none, or is not installed."""
    if not transformers_version():
        return ""
    from transformers.models.auto import modeling_auto  # noqa: PLC0415  # as above

    names = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    return str(names.get(hf_config.get("model_type"), ""))


def knows(hf_config: Mapping[str, Any], architecture: str) -> bool:
    """Whether the library has code for an architecture, or for its model without a head."""
    found = class_name(hf_config)
    return bool(found) and architecture in (found, found.removesuffix("ForCausalLM") + BASE, "")


def config_object(hf_config: Mapping[str, Any]) -> Any:
    """The library's own config object. Raises `ConfigError` for a config that the library refuses,
    for encoder-decoders, and for rotary positions that depend on a batch's length."""
    kind = str(hf_config.get("model_type"))
    transformers = transformers_of("model_type", kind)
    own = {
        name: value for name, value in hf_config.items() if name not in ("auto_map", "model_type")
    }
    try:
        config = transformers.AutoConfig.for_model(kind, **own)
    except Exception as error:
        # The library raises whatever its checks of fields raise.
        raise ConfigError(
            "model_type", kind, f"a config that transformers takes: {error}"
        ) from None
    require(
        not config.is_encoder_decoder,
        "is_encoder_decoder",
        True,
        "false: decoders without encoders",
    )
    for rope in _ropes(config):
        kind = rope.get("rope_type", "default")
        allowed = "kinds that do not depend on the longest row of a batch"
        require(kind not in ("dynamic", "longrope"), "rope_type", kind, allowed)
    return config


def _ropes(config: Any) -> Iterator[Mapping[str, Any]]:
    """Parameters of rotary positions, of which some models have one for each kind of layers."""
    found = getattr(config, "rope_parameters", None)
    if isinstance(found, Mapping):
        yield found
        yield from (each for each in found.values() if isinstance(each, Mapping))


def module_of(
    hf_config: Mapping[str, Any], attention: str, dtype: torch.dtype, device: str
) -> nn.Module:
    """The architecture's module. Its parameters are on the device `meta`, without numbers; its
    other tensors are on `device`. Raises `ConfigError`."""
    config = config_object(hf_config)
    transformers = transformers_of("model_type", config.model_type)
    name = class_name(hf_config)
    found = getattr(transformers, name, None)
    has_interface = found is not None and getattr(found, "_supports_attention_backend", False)
    allowed = "architectures whose attention goes through transformers' attention interface"
    require(has_interface, "architectures", name, allowed)
    with torch.device(device), _without_numbers():
        module: nn.Module = transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation=attention, dtype=dtype, trust_remote_code=False
        )
    return module.eval()


def output_of(hidden: torch.Tensor) -> Any:
    """Output of a base model that makes hidden states alone."""
    from transformers import modeling_outputs  # noqa: PLC0415  # as above

    return modeling_outputs.BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=hidden)


@contextmanager
def _without_numbers() -> Iterator[None]:
    """Scope in which modules get parameters without memory."""

    def emptied(module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter:
        return nn.Parameter(parameter.detach().to("meta"), requires_grad=False)

    # torch's annotation leaves out the result.
    register_hook: Any = nn.modules.module.register_module_parameter_registration_hook
    hook = register_hook(emptied)
    try:
        yield
    finally:
        hook.remove()
