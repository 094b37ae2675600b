"""How a checkpoint's weights are packed, read from its `config.json`. Knows nothing about
tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ...config import ConfigError, require
from . import compressed_tensors
from .packing import KEY, Config, Packing, Quantization, check, group_size_of, one_of

OLD_KEY = "compression_config"
"""An older key of compressed-tensors, read where the other is missing."""
UNPACKED_BITS = 16
"""Layers of so many bits are in the file as they are."""
AUTO_ROUND_PACKINGS = {"auto_round:auto_gptq": "gptq", "auto_round:auto_awq": "awq"}
ROUNDED = "headwater"
"""Method of models that were rounded by Headwater when they were converted; `kind` is one of
`KINDS`."""
KINDS = {
    "fp8": Packing(format="fp8", bits=8),
    "int8": Packing(format="pack_quantized", bits=8, group_size=32),
    "int4": Packing(format="pack_quantized", bits=4, group_size=32),
}
"""Kinds that a model can be rounded to, as random weights have them; rounding makes groups as large
as layers allow."""
AUTO = "auto"
GGUF = "gguf"
NONE = "none"
"""Values of `--quantization`: what the checkpoint has; names of GGUF's block formats, and of
weights that are not packed."""


def read_quantization(config: Config) -> Quantization | None:
    """None: weights are as they are. Raises `ConfigError` naming the field that is not served."""
    key = OLD_KEY if config.get(KEY) is None else KEY
    given = config.get(key)
    if given is None:
        return None
    method = _method(given)
    if method == ROUNDED and isinstance(given, Mapping):
        return _rounded(given)
    if str(method) not in METHODS or not isinstance(given, Mapping):
        raise ConfigError(f"{key}.quant_method", method, _allowed_methods())
    return METHODS[str(method)](given)


def _method(given: object) -> object:
    return given.get("quant_method") if isinstance(given, Mapping) else given


def _allowed_methods() -> str:
    return f"{', '.join(METHODS)}, or a checkpoint of float32, bfloat16 or float16"


def _gptq(given: Config) -> Quantization:
    bits = one_of(given, "bits", (4, 8))
    check(given, "pack_dtype", "int32", default="int32")
    check(given, "lm_head", False, default=False)
    require(
        not given.get("dynamic"),
        f"{KEY}.dynamic",
        given.get("dynamic"),
        "none: all packed layers alike",
    )
    name = "checkpoint_format" if "checkpoint_format" in given else "format"
    zero_offset = 1 if one_of(given, name, ("gptq", "gptq_v2"), default="gptq") == "gptq" else 0
    size = group_size_of(given)
    return Quantization.uniform(
        "gptq",
        Packing(
            format="gptq",
            bits=bits,
            group_size=size,
            zero_offset=zero_offset,
            is_symmetric=given.get("sym") is True,
            has_order=True,
        ),
    )


def _awq(given: Config) -> Quantization:
    """AutoAWQ's own files name fields otherwise than transformers does."""
    check(given, "w_bit" if "w_bit" in given else "bits", 4)
    check(given, "zero_point", True, default=True)
    version = given.get("version", "gemm")
    if not (isinstance(version, str) and version.lower() == "gemm"):
        raise ConfigError(f"{KEY}.version", version, "gemm")
    name = "q_group_size" if "q_group_size" in given else "group_size"
    return Quantization.uniform(
        "awq", Packing(format="awq", bits=4, group_size=group_size_of(given, name))
    )


def _auto_round(given: Config) -> Quantization:
    packing = AUTO_ROUND_PACKINGS[
        one_of(given, "packing_format", tuple(AUTO_ROUND_PACKINGS), default="")
    ]
    bits = one_of(given, "bits", (4, 8) if packing == "gptq" else (4,))
    check(given, "data_type", "int", default="int")
    extra = given.get("extra_config") or {}
    if not isinstance(extra, Mapping):
        raise ConfigError(f"{KEY}.extra_config", extra, "packings by layer")
    for layer, own in extra.items():
        found = own.get("bits", bits) if isinstance(own, Mapping) else own
        if not (isinstance(found, int) and found >= UNPACKED_BITS):
            raise ConfigError(
                f"{KEY}.extra_config.{layer}.bits",
                found,
                f"{UNPACKED_BITS}: all packed layers alike",
            )
    zero_offset = 1 if packing == "gptq" else 0
    own_packing = Packing(
        format=packing, bits=bits, group_size=group_size_of(given), zero_offset=zero_offset
    )
    return Quantization.uniform("auto-round", own_packing)


def _fp8(given: Config) -> Quantization:
    """Scales of blocks (`weight_scale_inv`), or one for a matrix (`weight_scale`)."""
    check(given, "fmt", "e4m3", default="e4m3")
    one_of(given, "activation_scheme", ("dynamic", "static"), default="dynamic")
    size = given.get("weight_block_size")
    if size is not None and not _is_block(size):
        raise ConfigError(
            f"{KEY}.weight_block_size", size, "two positive numbers, outputs and inputs, or none"
        )
    block = None if size is None else (int(size[0]), int(size[1]))
    scale = "weight_scale" if block is None else "weight_scale_inv"
    return Quantization.uniform(
        "fp8", Packing(format="fp8", bits=8, block=block, scale=scale, activations="fp8")
    )


def _is_block(size: object) -> bool:
    return (
        isinstance(size, list | tuple)
        and len(size) == 2
        and all(type(each) is int and each > 0 for each in size)
    )


def _fbgemm_fp8(given: Config) -> Quantization:
    """A scale for each output; activations are rounded token by token."""
    return Quantization.uniform(
        "fbgemm_fp8", Packing(format="fp8", bits=8, has_one_scale=False, activations="fp8")
    )


def _mxfp4(given: Config) -> Quantization:
    """Experts; what the config lists as not converted is not packed in the file."""
    return Quantization.uniform("mxfp4", Packing(format="mxfp4", bits=4, group_size=32))


def _rounded(given: Config) -> Quantization:
    kind = one_of(given, "kind", tuple(KINDS))
    return Quantization.uniform(kind, KINDS[kind])


METHODS: dict[str, Callable[[Config], Quantization]] = {
    "gptq": _gptq,
    "awq": _awq,
    "auto-round": _auto_round,
    "fp8": _fp8,
    "fbgemm_fp8": _fbgemm_fp8,
    "mxfp4": _mxfp4,
    "compressed-tensors": compressed_tensors.read,
}
"""Readers by `quant_method`."""
QUANTIZATIONS = (AUTO, *dict.fromkeys((*KINDS, *METHODS, GGUF)))
"""Values of `--quantization`: a kind that weights are rounded to at conversion, or the name that a
checkpoint's method must have."""


def check_quantization(chosen: str, found: str, what: str) -> None:
    """Raises `ConfigError` where a method or kind is asserted and `what` has another, `NONE` for no
    packed weights."""
    require(chosen in QUANTIZATIONS, "quantization", chosen, ", ".join(QUANTIZATIONS))
    if chosen in (AUTO, found):
        return
    require(found != NONE, "quantization", chosen, f"{AUTO}: the weights of {what} are not packed")
    raise ConfigError(
        "quantization", chosen, f"{AUTO} or {found}, as the weights of {what} are packed"
    )
