"""An adapter's `adapter_config.json` in PEFT's layout: what is served, and what is refused by its
field. Reads no tensors."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ...config import ConfigError, require

MAX_RANK = 256
MAX_PATTERNS = 4096
MAX_PATTERN_CHARS = 200
MAX_REPEATS = 2
"""Repeats in a pattern: each multiplies the time in which a name is compared with it."""
ALL_LINEAR = "all-linear"
Value = Any
_REPEAT = re.compile(r"[*+{]")
_REPEATED_GROUP = re.compile(r"\)[*+{?]")

UNUSED = frozenset(
    {
        *("auto_mapping", "base_model_name_or_path", "revision", "inference_mode", "peft_version"),
        *("lora_dropout", "eva_config", "loftq_config", "corda_config", "lora_ga_config"),
        *("exclude_modules", "layers_to_transform", "layers_pattern", "ensure_weight_tying"),
        *("qalora_group_size", "runtime_config", "megatron_core", "target_modules"),
    }
)
"""Fields without effect on an adapter whose tensors exist: how it was trained, and which layers
have tensors."""
REFUSED = {
    "use_dora": "false: DoRA is not served",
    "modules_to_save": "none: whole layers that were trained beside the adapter are not served",
    "trainable_token_indices": "none: tokens that were trained are not served",
    "lora_bias": "false: biases of adapters are not served",
    "fan_in_fan_out": "false",
    "layer_replication": "none",
    "use_qalora": "false",
    "use_bdlora": "false",
    "megatron_config": "none",
    "alora_invocation_tokens": "none: adapters that begin at a token are not served",
    "arrow_config": "none",
    "target_parameters": "none: adapters of parameters that are no linear layers are not served",
    "monteclora_config": "none",
    "velora_config": "none",
}
"""Fields that would change a product, each with its allowed value."""
INITS = (None, True, False, "gaussian", "eva", "orthogonal", "lora_ga")
"""Values of `init_lora_weights` that leave the weights of the base model as they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterConfig:
    """Ranks and factors of an adapter by layer."""

    rank: int
    alpha: float
    is_rank_stabilized: bool
    """Whether factors are alpha / √rank (rslora) instead of alpha / rank."""
    targets: frozenset[str] | None
    """Suffixes of names of layers with an adapter; None: the layers that have tensors."""
    ranks: tuple[tuple[str, int], ...]
    """Patterns of names of layers, each with their rank."""
    alphas: tuple[tuple[str, float], ...]

    def rank_of(self, layer: str) -> int:
        """Rank of a layer by its published name."""
        return int(_first_match(self.ranks, layer, self.rank))

    def factor_of(self, layer: str) -> float:
        """Number by which a layer's product with the adapter is multiplied."""
        rank = self.rank_of(layer)
        alpha = _first_match(self.alphas, layer, self.alpha)
        return alpha / (math.sqrt(rank) if self.is_rank_stabilized else rank)

    def is_target(self, layer: str) -> bool:
        """Whether the config names the layer."""
        return self.targets is None or any(
            layer == target or layer.endswith("." + target) for target in self.targets
        )


def object_of(data: bytes, name: str) -> dict[str, Any]:
    """The object of a file of JSON. Raises `ConfigError` where it holds none."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        raise ConfigError("adapter file", name, "a file of JSON") from None
    require(isinstance(found, dict), "adapter file", name, "a file with an object of JSON")
    return dict(found)


def config_of(fields: Mapping[str, Value]) -> AdapterConfig:
    """Raises `ConfigError` naming the field that is not served."""
    kind = fields.get("peft_type")
    require(kind == "LORA", "peft_type", _shown(kind), "LORA")
    task = fields.get("task_type")
    require(task in (None, "CAUSAL_LM"), "task_type", _shown(task), "CAUSAL_LM")
    _check_fields(fields)
    rank = _rank(fields.get("r"), "r")
    return AdapterConfig(
        rank=rank,
        alpha=_factor(fields.get("lora_alpha"), "lora_alpha"),
        is_rank_stabilized=_flag(fields.get("use_rslora"), "use_rslora"),
        targets=_targets(fields.get("target_modules")),
        ranks=_patterns(fields.get("rank_pattern"), "rank_pattern", _rank),
        alphas=_patterns(fields.get("alpha_pattern"), "alpha_pattern", _factor),
    )


_READ = frozenset(
    {
        *("peft_type", "task_type", "r", "lora_alpha", "use_rslora", "target_modules", "bias"),
        *("rank_pattern", "alpha_pattern", "init_lora_weights"),
    }
)


def _check_fields(fields: Mapping[str, Value]) -> None:
    """Raises `ConfigError` for the first field that would change a product. Fields of later
    versions are refused where they have a value."""
    for name, value in fields.items():
        if value and name not in _READ | UNUSED:
            allowed = REFUSED.get(name, "none: this version does not know the field")
            raise ConfigError(_shown(name), _shown(value), allowed)
    bias = fields.get("bias", "none")
    require(bias in (None, "none"), "bias", _shown(bias), "none")
    init = fields.get("init_lora_weights")
    is_plain = isinstance(init, bool | str | None) and init in INITS
    allowed = "an initialization that leaves the base model as it is"
    require(is_plain, "init_lora_weights", _shown(init), allowed)


def _targets(value: Value) -> frozenset[str] | None:
    """Endings of a list. A regular expression is not evaluated: an adapter has tensors of the
    layers that it matched."""
    if value is None or isinstance(value, str):
        return None
    is_list = isinstance(value, list) and all(isinstance(each, str) for each in value)
    allowed = f"{ALL_LINEAR}, a regular expression or a list of names"
    require(is_list, "target_modules", _shown(value), allowed)
    require(
        len(value) <= MAX_PATTERNS,
        "target_modules",
        f"{len(value)} names",
        f"at most {MAX_PATTERNS}",
    )
    return frozenset(value)


def _rank(value: Value, name: str) -> int:
    is_rank = type(value) is int and 1 <= value <= MAX_RANK
    require(is_rank, name, _shown(value), f"1…{MAX_RANK}")
    return int(value)


def _factor(value: Value, name: str) -> float:
    is_number = type(value) in (int, float) and abs(value) <= 1e6 and math.isfinite(value)
    require(is_number, name, _shown(value), "a number between -1e6 and 1e6")
    return float(value)


def _flag(value: Value, name: str) -> bool:
    require(value in (None, True, False), name, _shown(value), "true or false")
    return bool(value)


def _patterns(
    value: Value, name: str, number: Callable[[Value, str], Any]
) -> tuple[tuple[str, Any], ...]:
    """(pattern, value) pairs. Only regular expressions are allowed that match in little time."""
    value = value or {}
    require(isinstance(value, dict), name, _shown(value), "an object")
    require(len(value) <= MAX_PATTERNS, name, f"{len(value)} entries", f"at most {MAX_PATTERNS}")
    return tuple(
        (_pattern(key, name), number(each, f"{name} of {key[:MAX_PATTERN_CHARS]}"))
        for key, each in value.items()
    )


def _pattern(key: str, name: str) -> str:
    is_short = len(key) <= MAX_PATTERN_CHARS
    is_simple = len(_REPEAT.findall(key)) <= MAX_REPEATS and not _REPEATED_GROUP.search(key)
    allowed = f"patterns of {MAX_PATTERN_CHARS} characters with at most {MAX_REPEATS} repeats"
    require(is_short and is_simple, name, _shown(key), allowed)
    try:
        re.compile(key)
    except re.error as error:
        raise ConfigError(name, _shown(key), f"regular expressions ({error})") from None
    return key


def _first_match(patterns: tuple[tuple[str, Any], ...], layer: str, otherwise: float) -> float:
    for pattern, number in patterns:
        if re.match(rf"(.*\.)?({pattern})$", layer):
            return float(number)
    return otherwise


def _shown(value: Value) -> str:
    """A value of the file, in a few characters."""
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
