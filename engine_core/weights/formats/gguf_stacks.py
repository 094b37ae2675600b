"""Weights of all experts of a layer in GGUF files of gpt-oss, in the layout of its published
checkpoints: gates and ups in turns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import gguf
import numpy as np
import torch

from headwater.kernels.quant.mxfp4 import BLOCK, MOST_SCALE, Mxfp4Weight, pack

from ...config import ConfigError, require

BLOCK_BYTES = 17
"""Bytes of a block of MXFP4: its scale, then 16 of two numbers, of which those in the lower halves
come first."""
GATES, UPS, DOWNS = "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"
Stack = torch.Tensor | Mxfp4Weight
"""float32 [experts, outputs, inputs], or packed [experts * outputs, inputs]."""


def experts_of(
    tensors: Mapping[str, Any], layer: str, stem: str, kind: str
) -> Iterator[tuple[str, Stack]]:
    """The published weight or bias that a tensor of a layer belongs to, with its name; gates yield
    that of gates and ups, ups yield nothing. `tensors`: those of the file by name. Raises
    `ConfigError`."""
    name = f"model.layers.{layer}.mlp.experts"
    is_bias = kind == "bias"
    read = _biases if is_bias else _stack
    end = "_bias" if is_bias else ""
    if stem == DOWNS:
        down = read(tensors, f"blk.{layer}.{DOWNS}.{kind}")
        yield f"{name}.down_proj{end}", down if is_bias else _inputs_first(down)
    elif stem == GATES:
        gates, ups = (read(tensors, f"blk.{layer}.{each}.{kind}") for each in (GATES, UPS))
        both = _in_turns(gates, ups)
        yield f"{name}.gate_up_proj{end}", both if is_bias else _inputs_first(both)


def _tensor(tensors: Mapping[str, Any], name: str, num_dims: int) -> Any:
    tensor = tensors.get(name)
    if tensor is None:
        raise ConfigError("checkpoint", f"without {name}", "every tensor of the architecture")
    sizes = [int(size) for size in tensor.shape]
    require(len(sizes) == num_dims, f"checkpoint tensor {name}", sizes, f"{num_dims} dimensions")
    return tensor


def _biases(tensors: Mapping[str, Any], name: str) -> torch.Tensor:
    """float32 [experts, outputs]"""
    tensor = _tensor(tensors, name, 2)
    values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    return torch.from_numpy(np.array(values, dtype=np.float32))


def _stack(tensors: Mapping[str, Any], name: str) -> Stack:
    tensor = _tensor(tensors, name, 3)
    if tensor.tensor_type != gguf.GGMLQuantizationType.MXFP4:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        return torch.from_numpy(np.array(values, dtype=np.float32))
    num_inputs, num_outputs, num_experts = (int(size) for size in tensor.shape)
    num_rows = num_experts * num_outputs
    blocks = np.array(tensor.data).reshape(num_rows, num_inputs // BLOCK, BLOCK_BYTES)
    scales = torch.from_numpy(blocks[:, :, 0].T.copy())
    if (most := int(scales.max())) > MOST_SCALE:
        allowed = f"scales up to {MOST_SCALE}, which is 2"
        raise ConfigError(f"checkpoint tensor {name}", f"up to {most}", allowed)
    halves = blocks[:, :, 1:]
    numbers = np.concatenate((halves & 15, halves >> 4), axis=2)
    pairs = numbers[:, :, 0::2] | numbers[:, :, 1::2] << 4
    words = pack(torch.from_numpy(pairs.reshape(num_rows, num_inputs // 2)))
    return Mxfp4Weight(words=words, scales=scales)


def _in_turns(gates: Stack, ups: Stack) -> Stack:
    """Outputs of both, a gate and an up in turns. Raises `ConfigError`."""
    if isinstance(gates, Mxfp4Weight) and isinstance(ups, Mxfp4Weight):
        words = torch.stack([gates.words, ups.words], 1).flatten(0, 1)
        scales = torch.stack([gates.scales, ups.scales], 2).flatten(1, 2)
        return Mxfp4Weight(words=words, scales=scales)
    is_plain = isinstance(gates, torch.Tensor) and isinstance(ups, torch.Tensor)
    require(is_plain, "types of gates and ups of experts", "two", "one")
    assert isinstance(gates, torch.Tensor)
    assert isinstance(ups, torch.Tensor)
    return torch.stack([gates, ups], 2).flatten(1, 2)


def _inputs_first(stack: Stack) -> Stack:
    """Weights that are not packed have their inputs before their outputs."""
    return stack if isinstance(stack, Mxfp4Weight) else stack.transpose(1, 2)
