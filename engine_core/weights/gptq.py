"""Layers as GPTQ's tools pack them (Frantar et al., 2022; the layout of AutoGPTQ and GPTQModel).

qweight int32 [K / 8, N]: word r of a column holds inputs 8 r … 8 r + 7, the first in the lowest four bits. qzeros int32
[groups, N / 8]: likewise along the outputs. scales [groups, N]. g_idx int32 [K]: the group of each input.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from headwater.kernels.int4_layout import WORD, Int4Weight, pack

from ..config import ConfigError
from .int4 import SCALE_DTYPES, check_shape, nibbles_of, num_groups

SUFFIXES = ("qweight", "qzeros", "scales", "g_idx")


def unpack(name: str, tensors: Mapping[str, torch.Tensor], *, group_size: int, zero_offset: int) -> Int4Weight:
    """zero_offset is added to stored zero points: 1 in the first version of the format, 0 in the second. Raises
    `ConfigError` naming the tensor that does not fit."""
    qweight, qzeros, scales, g_idx = (tensors[suffix] for suffix in SUFFIXES)
    if qweight.ndim != 2:
        raise ConfigError(f"checkpoint tensor {name}.qweight", tuple(qweight.shape), "[inputs / 8, outputs]")
    k, n = qweight.shape[0] * WORD, qweight.shape[1]
    groups = num_groups(name, k, group_size)
    check_shape(f"{name}.qweight", qweight, (k // WORD, n), torch.int32)
    check_shape(f"{name}.qzeros", qzeros, (groups, -(-n // WORD)), torch.int32)
    check_shape(f"{name}.scales", scales, (groups, n), *SCALE_DTYPES)
    check_shape(f"{name}.g_idx", g_idx, (k,), torch.int32, torch.int64)
    if not (int(g_idx.min()) >= 0 and int(g_idx.max()) < groups):
        value = f"{int(g_idx.min())}…{int(g_idx.max())}"
        raise ConfigError(f"checkpoint tensor {name}.g_idx", value, f"groups 0…{groups - 1}")
    in_order = torch.arange(k, dtype=g_idx.dtype) // (k // groups)
    return Int4Weight(
        words=pack(nibbles_of(qweight.t()).flatten(1)),
        scales=scales,
        # A stored zero point has four bits too: one less than 0 is 15.
        zeros=(nibbles_of(qzeros).flatten(1)[:, :n] + zero_offset) & 15,
        groups=None if torch.equal(g_idx, in_order) else g_idx.to(torch.int32),
    )
