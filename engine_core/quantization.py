"""How a checkpoint's weights are packed, read from its `config.json`. Knows nothing about tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .config import ConfigError

KEY, OLD_KEY = "quantization_config", "compression_config"
"""Keys under which a checkpoint says it; the second is an older one of compressed-tensors."""
METHODS = ("gptq", "awq", "auto-round")
GROUP_SIZES = (32, 64, 128, -1)
"""Inputs that share a scale; -1: all inputs of an output."""
UNPACKED_BITS = 16
"""Layers of so many bits are in the file as they are."""
AUTO_ROUND_PACKINGS = {"auto_round:auto_gptq": "gptq", "auto_round:auto_awq": "awq"}
Config = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantization:
    """Four bits a weight, in groups of inputs."""

    method: str
    """The checkpoint's name for it, one of `METHODS`."""
    packing: str
    """Layout of its tensors: `gptq` or `awq`."""
    group_size: int
    zero_offset: int = 0
    """Added to stored zero points."""


def read_quantization(config: Config) -> Quantization | None:
    """None: weights are as they are. Raises `ConfigError` naming the field that is not served."""
    if config.get(OLD_KEY) is not None:
        raise ConfigError(f"{OLD_KEY}.quant_method", _method(config[OLD_KEY]), _allowed_methods())
    given = config.get(KEY)
    if given is None:
        return None
    method = _method(given)
    if method not in METHODS or not isinstance(given, Mapping):
        raise ConfigError(f"{KEY}.quant_method", method, _allowed_methods())
    read = {"gptq": _gptq, "awq": _awq, "auto-round": _auto_round}[method]
    return read(given)


def _method(given: object) -> object:
    return given.get("quant_method") if isinstance(given, Mapping) else given


def _allowed_methods() -> str:
    return f"{', '.join(METHODS)}, or a checkpoint of float32, bfloat16 or float16"


def _gptq(given: Config) -> Quantization:
    _check(given, "bits", 4)
    _check(given, "pack_dtype", "int32", default="int32")
    _check(given, "lm_head", False, default=False)
    if given.get("dynamic"):
        raise ConfigError(f"{KEY}.dynamic", given["dynamic"], "none: all packed layers alike")
    form = _one_of(
        given, "checkpoint_format" if "checkpoint_format" in given else "format", ("gptq", "gptq_v2"), "gptq"
    )
    zero_offset = 1 if form == "gptq" else 0
    return Quantization(method="gptq", packing="gptq", group_size=_group_size(given), zero_offset=zero_offset)


def _awq(given: Config) -> Quantization:
    """AutoAWQ's own files name fields otherwise than transformers does."""
    _check(given, "w_bit" if "w_bit" in given else "bits", 4)
    _check(given, "zero_point", True, default=True)
    version = given.get("version", "gemm")
    if not (isinstance(version, str) and version.lower() == "gemm"):
        raise ConfigError(f"{KEY}.version", version, "gemm")
    name = "q_group_size" if "q_group_size" in given else "group_size"
    return Quantization(method="awq", packing="awq", group_size=_group_size(given, name))


def _auto_round(given: Config) -> Quantization:
    _check(given, "bits", 4)
    _check(given, "data_type", "int", default="int")
    for layer, own in (given.get("extra_config") or {}).items():
        bits = own.get("bits", 4) if isinstance(own, Mapping) else own
        if not (isinstance(bits, int) and bits >= UNPACKED_BITS):
            raise ConfigError(f"{KEY}.extra_config.{layer}.bits", bits, f"{UNPACKED_BITS}: all packed layers alike")
    packing = AUTO_ROUND_PACKINGS[_one_of(given, "packing_format", tuple(AUTO_ROUND_PACKINGS), "")]
    zero_offset = 1 if packing == "gptq" else 0
    return Quantization(method="auto-round", packing=packing, group_size=_group_size(given), zero_offset=zero_offset)


def _check(given: Config, name: str, allowed: object, default: object = None) -> None:
    if (value := given.get(name, default)) != allowed:
        raise ConfigError(f"{KEY}.{name}", value, str(allowed))


def _one_of(given: Config, name: str, allowed: tuple[str, ...], default: str) -> str:
    value = given.get(name, default)
    if value not in allowed:
        raise ConfigError(f"{KEY}.{name}", value, " or ".join(allowed))
    return str(value)


def _group_size(given: Config, name: str = "group_size") -> int:
    value = given.get(name)
    if not (isinstance(value, int) and value in GROUP_SIZES):
        raise ConfigError(f"{KEY}.{name}", value, ", ".join(map(str, GROUP_SIZES)))
    return value
