"""Layers as GPTQ's tools pack them (Frantar et al., 2022; the layout of AutoGPTQ and GPTQModel), in
4 or 8 bits.

qweight int32 [K / c, N], c numbers a word: word r of a column holds inputs c r … c r + c - 1, the
first in the lowest bits. qzeros int32 [groups, N / c]: likewise along the outputs. scales [groups,
N]. g_idx int32 [K]: the group of each input; AutoRound leaves it out.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from headwater.kernels.quant.byte_weights import Int8Weight
from headwater.kernels.quant.int4_layout import Int4Weight, pack

from ...config import ConfigError
from ..grouped import SCALE_DTYPES, check_scales, check_tensor, integers_of, num_groups, order_of
from .packing import Packing

ORDER = "g_idx"


def suffixes(packing: Packing) -> tuple[str, ...]:
    return ("qweight", "qzeros", "scales", *((ORDER,) if packing.has_order else ()))


def drops(name: str, suffix: str, tensor: torch.Tensor, packing: Packing) -> bool:
    """Methods whose groups are always in order write their numbers or leave them out. Raises
    `ConfigError` for groups in another order."""
    if suffix != ORDER or packing.has_order:
        return False
    groups = num_groups(name, tensor.numel(), packing.group_size)
    if order_of(name, tensor, tensor.numel(), groups) is not None:
        raise ConfigError(
            f"checkpoint tensor {name}", "not in order", "groups that follow one another"
        )
    return True


def unpack(
    name: str, tensors: Mapping[str, torch.Tensor], packing: Packing
) -> Int4Weight | Int8Weight:
    """Raises `ConfigError` naming the tensor that does not fit."""
    qweight, qzeros, scales = (tensors[suffix] for suffix in ("qweight", "qzeros", "scales"))
    per_word = 32 // packing.bits
    if qweight.ndim != 2:
        raise ConfigError(
            f"checkpoint tensor {name}.qweight",
            tuple(qweight.shape),
            f"[inputs / {per_word}, outputs]",
        )
    k = qweight.shape[0] * per_word
    n = qweight.shape[1]
    groups = num_groups(name, k, packing.group_size)
    check_tensor(f"{name}.qweight", qweight, (k // per_word, n), torch.int32)
    check_tensor(f"{name}.qzeros", qzeros, (groups, -(-n // per_word)), torch.int32)
    check_tensor(f"{name}.scales", scales, (groups, n), *SCALE_DTYPES)
    check_scales(f"{name}.scales", scales)
    order = order_of(f"{name}.{ORDER}", tensors[ORDER], k, groups) if packing.has_order else None
    values = integers_of(qweight.t(), packing.bits).flatten(1)
    # A stored zero point has as many bits as a weight: one less than 0 is 15, or 255.
    zeros = (integers_of(qzeros, packing.bits).flatten(1)[:, :n] + packing.zero_offset) & (
        (1 << packing.bits) - 1
    )
    if packing.is_symmetric:
        _check_symmetric(name, zeros, packing)
    if packing.bits == 4:
        return Int4Weight(words=pack(values), scales=scales, zeros=zeros, groups=order)
    return Int8Weight(values=values, scales=scales, zeros=zeros, groups=order)


def _check_symmetric(name: str, zeros: torch.Tensor, packing: Packing) -> None:
    """Raises `ConfigError` for zero points that contradict symmetric weights: all are off by one in
    a file whose config names the wrong version."""
    middle = 1 << packing.bits - 1
    if not bool((zeros == middle).all()):
        allowed = (
            f"{middle} alone, as quantization_config.sym says; checkpoint_format may be another one"
        )
        raise ConfigError(
            f"zero points of {name}.qzeros", sorted(set(zeros.flatten().tolist())), allowed
        )
