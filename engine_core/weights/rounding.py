"""Weights of a model in fewer bits: round to nearest, group by group, without looking at what the
model reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from headwater.kernels.quant import int4_layout
from headwater.kernels.quant.byte_weights import Fp8Weight, Int8Weight
from headwater.kernels.quant.int4_layout import Int4Weight

from .grouped import GroupedWeight, expanded, named
from .layout import Layout
from .model_file import Tensors

HEAD = "lm_head"
"""Not rounded, as in published checkpoints; neither are embeddings."""
INT4_GROUPS = (32,)
INT8_GROUPS = (128, 64, 32)
"""Inputs that share a scale: the first that divides a layer's. Four bits that are rounded without a
text need the smallest groups."""
LEAST_SCALE = 2.0**-24
"""The smallest number of float16."""
FP8_MOST = 448.0
MIDDLE = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounding:
    """Effect of rounding a model's weights."""

    kind: str
    bytes_before: int
    """Bytes of all tensors before."""
    bytes_after: int
    relative_error: float
    """Root mean square of the changes of rounded weights, over that of these weights."""

    def __str__(self) -> str:
        before = self.bytes_before / 1e6
        after = self.bytes_after / 1e6
        return (
            f"rounded to {self.kind}: {before:.0f} MB became {after:.0f} MB, "
            f"and weights changed by {100 * self.relative_error:.2g} % (root mean square)"
        )


def round_weights(
    tensors: Tensors, layout: Layout, kind: str, dtype: torch.dtype
) -> tuple[Tensors, Rounding]:
    """The tensors of a model's file, linear layers rounded, where their inputs divide into groups;
    `dtype` is the one that the model computes in."""
    rounded = dict(tensors)
    changed = 0.0
    whole = 0.0
    for name, spec in layout.items():
        is_kept = not spec.is_linear or name == HEAD or spec.is_routing
        if is_kept or spec.tied_to or name not in tensors:
            continue
        weight = tensors[name].float()
        packed = ROUNDINGS[kind](weight)
        if packed is None:
            continue
        changed += (expanded(packed, dtype).float() - weight).double().square().sum().item()
        whole += weight.double().square().sum().item()
        del rounded[name]
        rounded |= named(packed, name)
    cost = Rounding(
        kind=kind,
        bytes_before=sum(tensor.nbytes for tensor in tensors.values()),
        bytes_after=sum(tensor.nbytes for tensor in rounded.values()),
        relative_error=(changed / whole) ** 0.5 if whole else 0.0,
    )
    return rounded, cost


def round_int4(weight: torch.Tensor) -> Int4Weight | None:
    """weight float32 [N, K]. Levels span the range from the least to the largest number of a group,
    zero included. None: the inputs cannot be divided into groups. Scales are bfloat16: kernels
    multiply by one of float16 twice."""
    if (groups := _groups(weight, INT4_GROUPS)) is None:
        return None
    low = groups.amin(2).clamp(max=0)
    high = groups.amax(2).clamp(min=0)
    scale = ((high - low) / 15).clamp(min=LEAST_SCALE).bfloat16()
    zero = (-low / scale.float()).round().clamp(0, 15)
    values = (groups / scale.float()[..., None]).round() + zero[..., None]
    words = int4_layout.pack(values.clamp(0, 15).to(torch.uint8).flatten(1))
    return Int4Weight(
        words=words, scales=scale.t().contiguous(), zeros=zero.t().to(torch.uint8).contiguous()
    )


def round_int8(weight: torch.Tensor) -> Int8Weight | None:
    """weight float32 [N, K]. Symmetric; None: no groups."""
    if (groups := _groups(weight, INT8_GROUPS)) is None:
        return None
    scale = (groups.abs().amax(2) / 127).clamp(min=LEAST_SCALE).half()
    values = (groups / scale.float()[..., None]).round().clamp(-127, 127) + MIDDLE
    zeros = torch.full(scale.t().shape, MIDDLE, dtype=torch.uint8)
    return Int8Weight(
        values=values.to(torch.uint8).flatten(1), scales=scale.t().contiguous(), zeros=zeros
    )


def round_fp8(weight: torch.Tensor) -> Fp8Weight:
    """weight float32 [N, K]. A scale for each output, made for tokens that are rounded as well."""
    scale = (weight.abs().amax(1) / FP8_MOST).clamp(min=LEAST_SCALE)
    values = (weight / scale[:, None]).clamp(-FP8_MOST, FP8_MOST).to(torch.float8_e4m3fn)
    return Fp8Weight(values=values, scales=scale[None], rounds_tokens=True)


ROUNDINGS: dict[str, Callable[[torch.Tensor], GroupedWeight | None]] = {
    "fp8": round_fp8,
    "int8": round_int8,
    "int4": round_int4,
}


def _groups(weight: torch.Tensor, sizes: tuple[int, ...]) -> torch.Tensor | None:
    """[N, groups, inputs of a group]"""
    size = next((each for each in sizes if weight.shape[1] % each == 0), None)
    return None if size is None else weight.view(len(weight), -1, size)
