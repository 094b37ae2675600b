"""Rotary positions as a `config.json` has them. Knows nothing about tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from ...config import ConfigError, require

DEFAULT_THETA = 10_000.0
"""`rope_theta` of most architectures where a config does not say."""
KINDS = (
    "default",
    "linear",
    "dynamic",
    "yarn",
    "longrope",
    "llama3",
    "proportional",
    "mrope",
    "su",
)
"""Types of scaled rotary positions. Of texts `mrope` is the default; `su` is an old name of
`longrope`."""
SERVED = ("default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional")
LLAMA3_FIELDS = ("factor", "low_freq_factor", "high_freq_factor")
ORIGINAL = "original_max_position_embeddings"


def mapping_of(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The object of a field; empty where there is none. Raises `ConfigError`."""
    value = config.get(name) or {}
    if not isinstance(value, Mapping):
        raise ConfigError(name, value, "an object")
    return value


def positive_of(config: Mapping[str, Any], name: str, default: float | None = None) -> float:
    """The number of a field. Raises `ConfigError`."""
    value = config.get(name, default)
    if not (isinstance(value, int | float) and 0 < value < float("inf")):
        raise ConfigError(name, value, "a positive number")
    return float(value)


def rope_of(config: Mapping[str, Any], default_theta: float = DEFAULT_THETA) -> dict[str, Any]:
    """Parameters of rotary positions, which old configs have flat and beside `rope_scaling`. Raises
    `ConfigError` where a config says two things."""
    given = mapping_of(config, "rope_parameters")
    scaling = mapping_of(config, "rope_scaling")
    if given and scaling and given != scaling:
        raise ConfigError("rope_scaling", scaling, "none beside rope_parameters, or the same")
    share = config.get("partial_rotary_factor")
    rope = {**({} if share is None else {"partial_rotary_factor": share}), **(given or scaling)}
    if config.get(ORIGINAL) is not None:
        rope[ORIGINAL] = config[ORIGINAL]
    flat = config.get("rope_theta")
    theta = rope.setdefault("rope_theta", default_theta if flat is None else flat)
    require(flat in (None, theta), "rope_theta", flat, f"none, or {theta} as in rope_parameters")
    return rope


def rotary_dim_of(rope: Mapping[str, Any], head_dim: int, *, has_parts: bool) -> int:
    """Numbers of a head that rotate; 0: all. `has_parts`: whether a part may. Raises
    `ConfigError`."""
    share = rope.get("partial_rotary_factor", 1)
    if share == 1 or _kind_of(rope) == "proportional":
        return 0
    require(has_parts, "partial_rotary_factor", share, "1: all of a head is rotated")
    is_share = isinstance(share, int | float) and 0 < share < 1
    width = int(head_dim * share) if is_share else 0
    allowed = f"above 0 and at most 1, an even number of the {head_dim} of a head"
    require(width > 0 and width % 2 == 0, "partial_rotary_factor", share, allowed)
    return width


def scaling_of(rope: Mapping[str, Any], config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The scaling of rotary positions with all of its parameters; None: there is none. Raises
    `ConfigError` naming what is not served."""
    kind = _kind_of(rope)
    try:
        numbers = _numbers_of(kind, rope, config)
    except ConfigError as error:
        raise error.of("rope_scaling") from None
    return None if kind == "default" else {"rope_type": kind, **numbers}


def _kind_of(rope: Mapping[str, Any]) -> str:
    # A factor alone does not say how positions are scaled.
    kind = rope.get("rope_type", rope.get("type", None if "factor" in rope else "default"))
    require(str(kind) in KINDS, "rope_scaling.rope_type", kind, ", ".join(SERVED))
    return {"mrope": "default", "su": "longrope"}.get(str(kind), str(kind))


def _numbers_of(kind: str, rope: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    read = _READERS.get(kind)
    return {} if read is None else read(rope, config)


def _linear(rope: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    return {"factor": positive_of(rope, "factor")}


def _dynamic(rope: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    return {"factor": positive_of(rope, "factor"), ORIGINAL: config["max_position_embeddings"]}


def _llama3(rope: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    return {name: positive_of(rope, name) for name in (*LLAMA3_FIELDS, ORIGINAL)}


def _proportional(rope: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    share = positive_of(rope, "partial_rotary_factor", 1.0)
    return {"share": share, "factor": positive_of(rope, "factor", 1.0)}


def _yarn(rope: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    original = positive_of(rope, ORIGINAL, config["max_position_embeddings"])
    factor = _factor_of(rope, config, original)
    truncate = rope.get("truncate", True)
    require(isinstance(truncate, bool), "truncate", truncate, "true or false")
    numbers = {"factor": factor, ORIGINAL: original, "truncate": truncate}
    for name, default in (("beta_fast", 32.0), ("beta_slow", 1.0)):
        numbers[name] = default if rope.get(name) is None else positive_of(rope, name)
    if rope.get("attention_factor") is not None:
        return numbers | {"attention_factor": positive_of(rope, "attention_factor")}
    attention = _mscale(factor, 1.0)
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        whole = _mscale(factor, positive_of(rope, "mscale_all_dim"))
        attention = _mscale(factor, positive_of(rope, "mscale")) / whole
    return numbers | {"attention_factor": attention}


def grown_scale(rope: Mapping[str, Any], config: Mapping[str, Any]) -> float:
    """Factor of the softmax's scale with stretched positions, where `mscale_all_dim` says that all
    numbers of queries and keys grow; else 1. Raises `ConfigError`."""
    if _kind_of(rope) != "yarn" or not rope.get("mscale_all_dim"):
        return 1.0
    original = positive_of(rope, ORIGINAL, config["max_position_embeddings"])
    grown = _mscale(_factor_of(rope, config, original), positive_of(rope, "mscale_all_dim"))
    return grown * grown


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _longrope(rope: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    original = positive_of(rope, ORIGINAL, config["max_position_embeddings"])
    factor = _factor_of(rope, config, original)
    numbers: dict[str, Any] = {ORIGINAL: original}
    for name in ("short_factor", "long_factor"):
        numbers[name] = _factors(rope, name)
    if rope.get("attention_factor") is not None:
        return numbers | {"attention_factor": positive_of(rope, "attention_factor")}
    grown = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return numbers | {"attention_factor": grown}


def _factor_of(rope: Mapping[str, Any], config: Mapping[str, Any], original: float) -> float:
    if rope.get("factor") is not None:
        return positive_of(rope, "factor")
    return float(config["max_position_embeddings"] / original)


def _factors(rope: Mapping[str, Any], name: str) -> tuple[float, ...]:
    given = rope.get(name) or ()
    is_list = isinstance(given, list | tuple) and len(given) > 0
    if not is_list or not all(isinstance(each, int | float) and each > 0 for each in given):
        raise ConfigError(name, given, "a list of positive numbers, one for each pair of a head")
    return tuple(float(each) for each in given)


_READERS: dict[str, Callable[[Mapping[str, Any], Mapping[str, Any]], dict[str, Any]]] = {
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "proportional": _proportional,
}
"""Readers of a scaling's parameters, by its type."""
