"""An architecture of models: its class, and how its config is read. Imports no model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..weights.formats.gguf_families import GgufFamily
from ..weights.model_config import ModelConfig

MODELS = "headwater.engine_core.models."
BOTH_WAYS = {
    f"{MODELS}decoder:Decoder": f"{MODELS}encoders.both_ways:BothWaysDecoder",
    f"{MODELS}gemma3:Gemma3": f"{MODELS}encoders.both_ways:BothWaysGemma3",
}
"""Keyed by the class of a decoder, that of the model whose tokens see each other."""
OF_SHAPES = ("not with `--numerics tree`", "no stages")
"""Limits of models with layers of several shapes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    model: str
    """`module:Class`, see `Model`."""
    read_config: Callable[[Mapping[str, Any]], ModelConfig]
    """Reads the content of `config.json`. Raises `ConfigError`."""
    family: str = ""
    """Name of its models, for people."""
    model_types: tuple[str, ...] = ()
    """Values of `model_type` that name the architecture where `architectures` is missing."""
    limits: tuple[str, ...] = ()
    """Limits of its models, for people."""
    is_text_part: bool = False
    """Whether it is the text part of a model that also reads images."""
    gguf: Mapping[str, GgufFamily] = field(default_factory=dict)
    """Families of GGUF files by `general.architecture`, for a model of another distribution; ours
    are in `FAMILIES`."""

    @property
    def both_ways(self) -> str:
        """`module:Class` of its models whose tokens see each other both ways; empty: there are
        none."""
        return BOTH_WAYS.get(self.model, "")


def own(
    model: str,
    read_config: Callable[[Mapping[str, Any]], ModelConfig],
    family: str,
    *model_types: str,
    limits: tuple[str, ...] = (),
    is_text_part: bool = False,
) -> Architecture:
    """An architecture of this room."""
    return Architecture(
        model=MODELS + model,
        read_config=read_config,
        family=family,
        model_types=model_types,
        limits=limits,
        is_text_part=is_text_part,
    )
