"""Fields that configs of several families share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from ...config import ConfigError, require
from ...weights.experts_config import ExpertsConfig
from ...weights.model_config import EXPERT_GATES, GATES, ModelConfig, size_of

SLIDING = "sliding_attention"
FULL = "full_attention"
DENSE = "dense"
SPARSE = "sparse"
MAX_WINDOW = 1 << 28
MAX_COUNT = 1 << 20
Config = Mapping[str, Any]


def kinds_of_layers(config: Config, is_windowed: Callable[[int], bool]) -> tuple[bool, ...]:
    """Whether each layer has a window: what `layer_types` says, else `is_windowed` of its number.
    Raises `ConfigError`."""
    num_layers = size_of(config, "num_hidden_layers")
    types = config.get("layer_types")
    if types is None:
        return tuple(is_windowed(i) for i in range(num_layers))
    is_known = isinstance(types, list) and all(kind in (SLIDING, FULL) for kind in types)
    if not is_known or len(types) != num_layers:
        raise ConfigError("layer_types", types, f"{num_layers} of {SLIDING} and {FULL}")
    return tuple(kind == SLIDING for kind in types)


def windows(
    config: Config, kinds: tuple[bool, ...], default: int | None = None, *, by_kind: bool = False
) -> dict[str, Any]:
    """Fields of a config whose layers of a kind have a window; none where it hides no key, unless
    layers differ `by_kind` in more than that. Raises `ConfigError`."""
    window = config.get("sliding_window", default)
    if window is None or not any(kinds):
        return {}
    is_window = type(window) is int and 1 <= window <= MAX_WINDOW
    require(is_window, "sliding_window", window, f"a whole number, 1…{MAX_WINDOW}, or none")
    if window >= size_of(config, "max_position_embeddings") and not by_kind:
        return {}
    return {"sliding_window": window, "is_windowed": kinds}


def every(config: Config, name: str, default: int) -> Callable[[int], bool]:
    """Predicate of layer numbers: true for all but every n-th layer, where the field `name` holds
    n. Raises `ConfigError`."""
    pattern = config.get(name, default)
    is_number = type(pattern) is int and 1 <= pattern <= MAX_WINDOW
    require(is_number, name, pattern, f"a whole number, 1…{MAX_WINDOW}")
    return lambda i: (i + 1) % pattern != 0


def count_of(config: Config, name: str, default: int | None = None, *, least: int = 1) -> int:
    """A number of experts, or one of their sizes. Raises `ConfigError`."""
    count = config.get(name, default)
    is_count = type(count) is int and least <= count <= MAX_COUNT
    require(is_count, name, count, f"a whole number, {least}…{MAX_COUNT}")
    return int(str(count))


def layers_with_experts(config: Config, has_experts: Callable[[int], bool]) -> tuple[bool, ...]:
    """Whether a layer has experts, by layer: as `mlp_layer_types` says, else `has_experts` of its
    number. Raises `ConfigError`."""
    num_layers = size_of(config, "num_hidden_layers")
    kinds = config.get("mlp_layer_types")
    if kinds is None:
        return tuple(has_experts(i) for i in range(num_layers))
    is_known = isinstance(kinds, list) and all(kind in (DENSE, SPARSE) for kind in kinds)
    if not is_known or len(kinds) != num_layers:
        raise ConfigError("mlp_layer_types", kinds, f"{num_layers} of {DENSE} and {SPARSE}")
    return tuple(kind == SPARSE for kind in kinds)


def with_experts(model: ModelConfig, experts: ExpertsConfig) -> ModelConfig:
    """The config of a model whose layers have experts. Raises `ConfigError` for experts without a
    gate."""
    is_gate = model.activation in EXPERT_GATES
    require(is_gate, "hidden_act", model.activation, " or ".join(GATES))
    has_any = any(experts.has_experts(i) for i in range(model.num_layers))
    require(has_any, "layers with experts", "none", "one and more")
    return replace(model, experts=experts)
