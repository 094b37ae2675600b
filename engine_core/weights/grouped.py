"""Linear layers whose weights share scales in groups of inputs, on their way from a checkpoint to a
model's file. Knows no published format: each has a file of its own beside this one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from headwater.kernels.quant import byte_weights, int4_layout, mxfp4
from headwater.kernels.quant.byte_weights import Fp8Weight, Int8Weight
from headwater.kernels.quant.int4_layout import BLOCK, Int4Weight, without_zeros, zero_points
from headwater.kernels.quant.mxfp4 import Mxfp4Weight

from ..config import ConfigError, require

GroupedWeight = Int4Weight | Int8Weight | Fp8Weight | Mxfp4Weight
INT4 = ".int4"
INT8 = ".int8"
W8A8 = ".w8a8"
FP8 = ".fp8"
FP8_TOKENS = ".f8a8"
MXFP4 = ".mxfp4"
"""Suffixes of packed values in a model's file: packed integers of four bits, integers of eight
bits, integers for rounded activations, FP8, FP8 for rounded activations, and MXFP4."""
SCALES = ".scales"
ZEROS = ".zeros"
GROUPS = ".groups"
"""Names of the tensors beside them."""
SCALE_DTYPES = (torch.float16, torch.bfloat16)
"""Their products with a weight minus its zero point are exact in float32."""
WIDE_SCALE_DTYPES = (*SCALE_DTYPES, torch.float32)


def named(weight: GroupedWeight, name: str) -> dict[str, torch.Tensor]:
    """The tensors of a weight as a model's file holds them. Symmetric weights of four bits have no
    zero points."""
    if isinstance(weight, Int4Weight):
        weight = without_zeros(weight)
        tensors = {
            INT4: weight.words,
            SCALES: weight.scales,
            ZEROS: weight.zeros,
            GROUPS: weight.groups,
        }
    elif isinstance(weight, Int8Weight):
        values = W8A8 if weight.rounds_tokens else INT8
        tensors = {
            values: weight.values,
            SCALES: weight.scales,
            ZEROS: weight.zeros,
            GROUPS: weight.groups,
        }
    elif isinstance(weight, Mxfp4Weight):
        tensors = {MXFP4: weight.words, SCALES: weight.scales}
    else:
        tensors = {
            FP8_TOKENS if weight.rounds_tokens else FP8: weight.values,
            SCALES: weight.scales,
        }
    return {
        name + suffix: tensor.contiguous()
        for suffix, tensor in tensors.items()
        if tensor is not None
    }


def weight_of(tensors: Mapping[str, torch.Tensor]) -> GroupedWeight:
    """The weight of its tensors by suffix."""
    [values] = tensors.keys() & {INT4, INT8, W8A8, FP8, FP8_TOKENS, MXFP4}
    numbers = tensors[values]
    scales = tensors[SCALES]
    groups = tensors.get(GROUPS)
    if values == INT4:
        return Int4Weight(words=numbers, scales=scales, zeros=tensors.get(ZEROS), groups=groups)
    if values == MXFP4:
        return Mxfp4Weight(words=numbers, scales=scales)
    rounds_tokens = values in (W8A8, FP8_TOKENS)
    if values in (FP8, FP8_TOKENS):
        return Fp8Weight(values=numbers, scales=scales, rounds_tokens=rounds_tokens)
    return Int8Weight(
        values=numbers,
        scales=scales,
        zeros=tensors[ZEROS],
        groups=groups,
        rounds_tokens=rounds_tokens,
    )


def expanded(weight: GroupedWeight, dtype: torch.dtype) -> torch.Tensor:
    """The weight [N, K] in the dtype."""
    if isinstance(weight, Int4Weight):
        return int4_layout.expand(weight, dtype)
    if isinstance(weight, Mxfp4Weight):
        return mxfp4.expand(weight, dtype)
    return byte_weights.expand(weight, dtype)


def can_join(parts: Sequence[GroupedWeight]) -> bool:
    """Whether the parts can be joined without expanding them."""
    return (
        len({type(part) for part in parts}) == 1
        and len({_rounds_tokens(part) for part in parts}) == 1
    )


def joined(name: str, parts: Sequence[GroupedWeight]) -> GroupedWeight:
    """The outputs of all parts, which are of one kind, in their order. Raises `ConfigError` where
    their inputs are grouped otherwise."""
    first = parts[0]
    for part in parts[1:]:
        if len(part.scales) != len(first.scales) or part.shape[1] != first.shape[1]:
            sizes = [each.shape[1] / len(each.scales) for each in parts]
            raise ConfigError(f"group sizes of the parts of {name}", sizes, "one size")
        if part.scales.dtype != first.scales.dtype:
            dtypes = [str(each.scales.dtype) for each in parts]
            raise ConfigError(f"dtypes of the scales of the parts of {name}", dtypes, "one dtype")
        if not _are_equal(_order(part), _order(first)):
            raise ConfigError(
                f"g_idx of the parts of {name}", "different", "the same for all of them"
            )
    scales = torch.cat([part.scales for part in parts], dim=1)
    if isinstance(first, Mxfp4Weight):
        words = torch.cat([part.words for part in parts if isinstance(part, Mxfp4Weight)])
        return replace(first, words=words, scales=scales)
    if isinstance(first, Fp8Weight):
        # torch joins no numbers of this type.
        values = torch.cat([_bytes(part) for part in parts]).view(first.values.dtype)
        return replace(first, values=values, scales=scales)
    zeros = torch.cat([_zeros(part) for part in parts], dim=1)
    if isinstance(first, Int4Weight):
        words = torch.cat([part.words for part in parts if isinstance(part, Int4Weight)])
        return replace(first, words=words, scales=scales, zeros=zeros)
    return replace(
        first, values=torch.cat([_bytes(part) for part in parts]), scales=scales, zeros=zeros
    )


def _bytes(part: GroupedWeight) -> torch.Tensor:
    assert not isinstance(part, Int4Weight | Mxfp4Weight)
    return part.values.view(torch.uint8)


def _zeros(part: GroupedWeight) -> torch.Tensor:
    assert not isinstance(part, Fp8Weight | Mxfp4Weight)
    return zero_points(part) if isinstance(part, Int4Weight) else part.zeros


def _order(part: GroupedWeight) -> torch.Tensor | None:
    return None if isinstance(part, Fp8Weight | Mxfp4Weight) else part.groups


def _rounds_tokens(part: GroupedWeight) -> bool:
    return not isinstance(part, Int4Weight | Mxfp4Weight) and part.rounds_tokens


def _are_equal(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    return a is b if a is None or b is None else torch.equal(a, b)


def check_tensor(
    name: str, tensor: torch.Tensor, shape: tuple[int, ...], *dtypes: torch.dtype
) -> None:
    """Raises `ConfigError`."""
    require(
        tuple(tensor.shape) == shape, f"checkpoint tensor {name}", tuple(tensor.shape), str(shape)
    )
    require(
        tensor.dtype in dtypes,
        f"dtype of tensor {name}",
        str(tensor.dtype),
        " or ".join(map(str, dtypes)),
    )


def check_scales(name: str, scales: torch.Tensor) -> None:
    """Raises `ConfigError` for scales that no weight can have."""
    if not bool(scales.float().isfinite().all()):
        raise ConfigError(f"checkpoint tensor {name}", "infinite or no number", "finite scales")


def num_groups(name: str, num_inputs: int, group_size: int) -> int:
    """Returns how many groups of this size the inputs make, -1 for all of them at once. Raises
    `ConfigError`."""
    size = num_inputs if group_size == -1 else group_size
    if not num_inputs or num_inputs % BLOCK or num_inputs % size:
        raise ConfigError(
            f"number of inputs of {name}", num_inputs, f"multiples of {max(size, BLOCK)}"
        )
    return num_inputs // size


def order_of(
    name: str, g_idx: torch.Tensor, num_inputs: int, num_groups: int
) -> torch.Tensor | None:
    """The group of each input as a weight has it: None where groups follow one another. Raises
    `ConfigError`."""
    check_tensor(name, g_idx, (num_inputs,), torch.int32, torch.int64)
    if not (int(g_idx.min()) >= 0 and int(g_idx.max()) < num_groups):
        value = f"{int(g_idx.min())}…{int(g_idx.max())}"
        raise ConfigError(f"checkpoint tensor {name}", value, f"groups 0…{num_groups - 1}")
    in_order = torch.arange(num_inputs, dtype=g_idx.dtype) // (num_inputs // num_groups)
    return None if torch.equal(g_idx, in_order) else g_idx.to(torch.int32)


def integers_of(words: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 [..., W] → uint8 [..., W, 32 / bits], the lowest four or eight bits first."""
    whole = words.contiguous().view(torch.uint8).view(*words.shape, 4)
    return whole if bits == 8 else torch.stack((whole & 15, whole >> 4), dim=-1).flatten(-2)
