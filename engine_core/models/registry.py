"""Model classes of architectures, by the name in `config.json`.

A distribution of its own adds one through the entry-point group `headwater.models`: the entry's
name is the architecture's, its value an `Architecture`. Imports no model before it is asked for, so
that a process which needs a config alone starts without torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from ..config import require
from ..weights.json_object import read_object
from ..weights.model_config import ModelConfig
from . import gemma3_config

ENTRY_POINTS = "headwater.models"


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    model: str
    """`module:Class`, see `Model`."""
    read_config: Callable[[Mapping[str, Any]], ModelConfig]
    """From what `config.json` says. Raises `ConfigError`."""


_DECODER = "headwater.engine_core.models.decoder:Decoder"
_GEMMA3 = "headwater.engine_core.models.gemma3:Gemma3"
ARCHITECTURES = {
    "Gemma3ForCausalLM": Architecture(model=_GEMMA3, read_config=gemma3_config.read_config),
    "LlamaForCausalLM": Architecture(model=_DECODER, read_config=ModelConfig.from_hf),
    "MistralForCausalLM": Architecture(model=_DECODER, read_config=ModelConfig.from_hf),
    "Qwen2ForCausalLM": Architecture(
        model=_DECODER, read_config=partial(ModelConfig.from_hf, qkv_bias=True)
    ),
    "Qwen3ForCausalLM": Architecture(
        model=_DECODER, read_config=partial(ModelConfig.from_hf, qk_norm=True)
    ),
}


def read_config(folder: Path) -> ModelConfig:
    """Raises `ConfigError` naming what is not served."""
    return config_of(read_object(folder / "config.json"))


def config_of(hf_config: Mapping[str, Any]) -> ModelConfig:
    """As `read_config`, from the file's content."""
    names = hf_config.get("architectures")
    name = names[0] if isinstance(names, list) and names else names
    return find(name if isinstance(name, str) else "").read_config(hf_config)


def find(name: str) -> Architecture:
    """Raises `ConfigError` for an architecture that is not served."""
    if name in ARCHITECTURES:
        return ARCHITECTURES[name]
    others = {entry.name: entry for entry in entry_points(group=ENTRY_POINTS)}
    require(name in others, "architectures", name, ", ".join([*ARCHITECTURES, *sorted(others)]))
    architecture: Architecture = others[name].load()
    return architecture
