"""Tensors of a GGUF file that hold a weight of all experts of a layer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import gguf
import numpy as np
import torch

from headwater.kernels.quant import mxfp4
from headwater.kernels.quant.block_formats import FORMATS, BlockWeight, pack
from headwater.kernels.quant.mxfp4 import Mxfp4Weight

from ...config import require

BLOCK_BYTES = 17
"""Size of a block of MXFP4: a scale, then 16 bytes, of which byte j holds number j in the lower
half and number j + 16 in the upper one."""


def weights_of(
    tensor: gguf.ReaderTensor, num_parts: int = 1
) -> Iterator[torch.Tensor | BlockWeight | Mxfp4Weight]:
    """The weights [N, K] of each expert in turn, whose outputs are `num_parts` equal ones. Raises
    `ConfigError` for a tensor of other dimensions, and for scales that are not served."""
    sizes = [int(size) for size in tensor.shape]
    is_stack = len(sizes) == 3 and sizes[1] % num_parts == 0
    require(is_stack, f"checkpoint tensor {tensor.name}", sizes, "[inputs, outputs, experts]")
    for expert in tensor.data:
        for rows in np.split(expert, num_parts):
            yield _weight(tensor, rows)


def _weight(
    tensor: gguf.ReaderTensor, rows: np.ndarray[Any, Any]
) -> torch.Tensor | BlockWeight | Mxfp4Weight:
    if tensor.tensor_type == gguf.GGMLQuantizationType.MXFP4:
        return _mxfp4(tensor.name, torch.from_numpy(np.array(rows, dtype=np.uint8)))
    format = FORMATS.get(tensor.tensor_type)
    if format is not None:
        return pack(torch.from_numpy(np.array(rows, dtype=np.uint8)), format)
    values = gguf.quants.dequantize(rows, tensor.tensor_type)
    return torch.from_numpy(np.array(values, dtype=np.float32))


def _mxfp4(name: str, rows: torch.Tensor) -> Mxfp4Weight:
    """rows: uint8 [N, K / 32 * 17]. Raises `ConfigError`."""
    blocks = rows.view(len(rows), -1, BLOCK_BYTES)
    scales, bytes_of = blocks[:, :, 0], blocks[:, :, 1:]
    most = int(scales.max())
    allowed = f"at most {mxfp4.MOST_SCALE}, a scale of 2"
    require(most <= mxfp4.MOST_SCALE, f"scales of tensor {name}", f"up to {most}", allowed)
    numbers = torch.cat((bytes_of & 15, bytes_of >> 4), dim=2)
    pairs = numbers[:, :, ::2] | numbers[:, :, 1::2] << 4
    return Mxfp4Weight(words=mxfp4.pack(pairs.flatten(1)), scales=scales.t().contiguous())


def in_turns(gates: torch.Tensor, ups: torch.Tensor) -> torch.Tensor:
    """Biases [experts, outputs] of gates and of ups → [experts, 2 * outputs] in pairs, as gpt-oss
    is published. Raises `ConfigError`."""
    shapes = (tuple(gates.shape), tuple(ups.shape))
    is_pair = gates.dim() == 2 and gates.shape == ups.shape
    require(is_pair, "biases of ffn_gate_exps and ffn_up_exps", shapes, "one shape")
    return torch.stack((gates, ups), dim=2).flatten(1)
