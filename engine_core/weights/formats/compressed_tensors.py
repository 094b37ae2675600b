"""Reads the packing of a compressed-tensors checkpoint: groups of layers, each with a scheme and a
format."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ...config import ConfigError, require
from .packing import KEY, PATTERN, Config, Packing, Quantization, Rule, check, group_size_of, one_of

FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
MIXED = "mixed-precision"
"""Format of a checkpoint whose groups name formats of their own."""
STRATEGIES = ("tensor", "channel", "group", "block")
MODIFIERS = ("sparsity_config", "transform_config")
"""Fields that change weights or activations beyond packing them."""


def read(given: Config) -> Quantization:
    """Raises `ConfigError` naming the field that is not served."""
    # Tools of 2024 called files frozen whose weights are packed, and wrote that nothing is sparse.
    one_of(given, "quantization_status", ("compressed", "frozen"), default="compressed")
    for name in MODIFIERS:
        value = given.get(name)
        is_none = not value or (isinstance(value, Mapping) and value.get("format") == "dense")
        require(is_none, f"{KEY}.{name}", value, "none")
    common = one_of(given, "format", (*FORMATS, MIXED))
    groups = given.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise ConfigError(f"{KEY}.config_groups", groups, "groups of layers by name")
    rules = [
        rule
        for name, group in groups.items()
        for rule in _rules(f"{KEY}.config_groups.{name}", group, common)
    ]
    return Quantization(
        method="compressed-tensors", rules=tuple(sorted(rules, key=lambda rule: rule.specificity))
    )


def _rules(key: str, group: Any, common: str) -> list[Rule]:
    targets = group.get("targets") if isinstance(group, Mapping) else None
    if not isinstance(targets, list) or not all(isinstance(each, str) for each in targets):
        raise ConfigError(f"{key}.targets", targets, "names or patterns of layers")
    for target in targets:
        try:
            re.compile(target.removeprefix(PATTERN) if target.startswith(PATTERN) else "")
        except re.error as error:
            raise ConfigError(
                f"{key}.targets", target, f"patterns that can be read ({error})"
            ) from None
    own = common if group.get("format") is None else one_of(group, "format", FORMATS, key=key)
    require(own != MIXED, f"{key}.format", None, " or ".join(FORMATS))
    packing = _packing(key, group, own)
    return [Rule(target, packing) for target in targets]


def _packing(key: str, group: Config, format: str) -> Packing:
    weights = group.get("weights")
    where = f"{key}.weights"
    if not isinstance(weights, Mapping):
        raise ConfigError(
            where, weights, "how weights are rounded: key-value caches alone are not packed"
        )
    kind = one_of(weights, "type", ("int", "float"), default="int", key=where)
    activations = _activations(key, group.get("input_activations"))
    strategy = _strategy(weights, where)
    if kind == "float":
        one_of({"format": format}, "format", ("float-quantized", "naive-quantized"), key=key)
        check(weights, "num_bits", 8, key=where)
        check(weights, "symmetric", True, default=True, key=where)
        block = _block(weights, where) if strategy == "block" else None
        size = group_size_of(weights, key=where) if strategy == "group" else -1
        return Packing(
            format="fp8",
            bits=8,
            group_size=size,
            block=block,
            has_one_scale=strategy == "tensor",
            activations=activations,
        )
    is_packed = format == "pack-quantized"
    one_of(
        {"format": format},
        "format",
        ("pack-quantized", "int-quantized", "naive-quantized"),
        key=key,
    )
    require(
        strategy != "block", f"{where}.strategy", strategy, "tensor, channel or group, for integers"
    )
    return Packing(
        format="pack_quantized" if is_packed else "int_quantized",
        bits=one_of(weights, "num_bits", (4, 8), key=where),
        group_size=group_size_of(weights, key=where) if strategy == "group" else -1,
        has_one_scale=strategy == "tensor",
        has_zeros=not weights.get("symmetric", True),
        has_order=weights.get("actorder") in ("group", "dynamic", True),
        activations=activations,
    )


def _strategy(weights: Config, key: str) -> str:
    """Files of before have groups without naming the strategy."""
    if weights.get("strategy") is None:
        return "group" if (weights.get("group_size") or -1) > 0 else "tensor"
    return str(one_of(weights, "strategy", STRATEGIES, key=key))


def _block(weights: Config, key: str) -> tuple[int, int]:
    given = weights.get("block_structure")
    sizes = given.split("x") if isinstance(given, str) else given
    try:
        outputs, inputs = (int(each) for each in sizes or ())
    except (TypeError, ValueError):
        outputs = inputs = 0
    require(
        outputs >= 1 and inputs >= 1,
        f"{key}.block_structure",
        given,
        "two positive numbers, outputs and inputs",
    )
    return outputs, inputs


def _activations(key: str, given: Any) -> str:
    if given is None:
        return ""
    if not isinstance(given, Mapping):
        raise ConfigError(f"{key}.input_activations", given, "how activations are rounded, or none")
    check(given, "num_bits", 8, key=f"{key}.input_activations")
    kind = one_of(given, "type", ("int", "float"), default="int", key=f"{key}.input_activations")
    return "int8" if kind == "int" else "fp8"
