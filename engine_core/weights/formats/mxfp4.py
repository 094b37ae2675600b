"""MXFP4 as gpt-oss is published: of each weight of all experts of a layer, blocks uint8
[E, N, K / 32, 16] of two numbers a byte, the first one in the lower half, and scales uint8
[E, N, K / 32] of e8m0."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from headwater.kernels.quant.mxfp4 import MOST_SCALE, Mxfp4Weight, pack

from ...config import ConfigError
from ..grouped import check_tensor
from .packing import Packing

BLOCKS = "_blocks"
SCALES = "_scales"
"""Ends of the names of a weight's tensors."""
PAIRS = 16
"""Bytes of a block."""


def suffixes(packing: Packing) -> tuple[str, ...]:
    return BLOCKS, SCALES


def drops(name: str, suffix: str, tensor: torch.Tensor, packing: Packing) -> bool:
    return False


def unpack(name: str, tensors: Mapping[str, torch.Tensor], packing: Packing) -> Mxfp4Weight:
    blocks = tensors[BLOCKS]
    scales = tensors[SCALES]
    if blocks.dim() != 4:
        allowed = f"experts, outputs, blocks, {PAIRS} bytes"
        raise ConfigError(f"checkpoint tensor {name}{BLOCKS}", tuple(blocks.shape), allowed)
    num_experts, num_outputs, num_blocks, _ = blocks.shape
    shape = num_experts, num_outputs, num_blocks
    check_tensor(name + BLOCKS, blocks, (*shape, PAIRS), torch.uint8)
    check_tensor(name + SCALES, scales, shape, torch.uint8)
    if (most := int(scales.max())) > MOST_SCALE:
        allowed = f"at most {MOST_SCALE}, a scale of 2"
        raise ConfigError(f"checkpoint tensor {name}{SCALES}", f"up to {most}", allowed)
    return Mxfp4Weight(
        words=pack(blocks.reshape(num_experts * num_outputs, num_blocks * PAIRS)),
        scales=scales.reshape(num_experts * num_outputs, num_blocks).t().contiguous(),
    )
