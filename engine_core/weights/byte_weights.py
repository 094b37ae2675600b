"""Linear layers of eight bits in a model's file."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from headwater.kernels.byte_weights import ByteWeight, Fp8Weight, Int8Weight, expand

from ..config import ConfigError
from .blocks import Parts
from .grouped import GROUPS, SCALES, WIDE_SCALE_DTYPES, ZEROS, check_tensor

INT8, W8A8, FP8, FP8_TOKENS = ".int8", ".w8a8", ".fp8", ".f8a8"
"""Names of the values in a model's file, behind the layer's: of integers, of integers made for activations that are
rounded too, and likewise of floating-point numbers."""
BYTES = (INT8, W8A8, FP8, FP8_TOKENS)
Keeps = Callable[[str, ByteWeight | Parts], bool]
"""Whether a platform has a product for a weight of a name, so that it stays packed."""


def named(weight: ByteWeight, name: str) -> dict[str, torch.Tensor]:
    """The tensors of a weight as a model's file holds them."""
    if isinstance(weight, Fp8Weight):
        tensors = {FP8_TOKENS if weight.rounds_tokens else FP8: weight.values, SCALES: weight.scales}
    else:
        tensors = {W8A8 if weight.rounds_tokens else INT8: weight.values, SCALES: weight.scales, ZEROS: weight.zeros}
        if weight.groups is not None:
            tensors[GROUPS] = weight.groups
    return {name + suffix: tensor.contiguous() for suffix, tensor in tensors.items()}


def stored(tensors: Mapping[str, torch.Tensor]) -> ByteWeight:
    """The weight of its tensors by suffix."""
    for name in (FP8, FP8_TOKENS):
        if name in tensors:
            return Fp8Weight(values=tensors[name], scales=tensors[SCALES], rounds_tokens=name == FP8_TOKENS)
    rounds_tokens = W8A8 in tensors
    return Int8Weight(
        values=tensors[W8A8 if rounds_tokens else INT8],
        scales=tensors[SCALES],
        zeros=tensors[ZEROS],
        groups=tensors.get(GROUPS),
        rounds_tokens=rounds_tokens,
    )


def keeps_none(name: str, weight: ByteWeight | Parts) -> bool:
    """The answer of platforms that have none."""
    return False


def expand_all(tensors: dict[str, torch.Tensor], dtype: torch.dtype, keeps: Keeps = keeps_none) -> None:
    """Puts every weight of eight bits in a model's file into the dtype, one after another, but those that are kept.
    Raises `ConfigError` naming the one that does not fit."""
    for name in [name for name in tensors if name.endswith(BYTES)]:
        layer, _, values = name.rpartition(".")
        own = {suffix: tensors.pop(layer + suffix, None) for suffix in (f".{values}", SCALES, ZEROS, GROUPS)}
        found = {suffix: tensor for suffix, tensor in own.items() if tensor is not None}
        _check(layer, f".{values}", found)
        if keeps(layer, weight := stored(found)):
            tensors |= named(weight, layer)
        else:
            tensors[layer] = expand(weight, dtype)


def _check(layer: str, values: str, tensors: Mapping[str, torch.Tensor]) -> None:
    is_fp8 = values in (FP8, FP8_TOKENS)
    for suffix in (SCALES,) if is_fp8 else (SCALES, ZEROS):
        if suffix not in tensors:
            raise ConfigError("checkpoint", f"without {layer}{suffix}", "every tensor of the architecture")
    n, k = tensors[values].shape
    groups = len(tensors[SCALES])
    if not groups or k % groups:
        raise ConfigError(f"groups of {layer}", f"{groups} of {k} inputs", "equal ones")
    dtypes = (torch.float32,) if is_fp8 else WIDE_SCALE_DTYPES
    check_tensor(layer + SCALES, tensors[SCALES], (groups, n), *dtypes)
    if not is_fp8:
        check_tensor(layer + ZEROS, tensors[ZEROS], (groups, n), torch.uint8)
