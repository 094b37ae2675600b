"""Makes one weight a layer of the tensors of a packed checkpoint. Each published format is a file
in `formats`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol

import torch

from ..config import ConfigError
from .formats import awq, fp8, gptq, int_quantized, mxfp4, pack_quantized
from .formats.packing import Packing, Quantization
from .grouped import GroupedWeight
from .names import Weight

PLAIN_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
KV_SCALES = (
    "k_scale",
    "v_scale",
    "q_scale",
    "kv_scale",
    "prob_output_scale",
    "k_zero_point",
    "v_zero_point",
)
"""Last parts of names of scales for key-value caches of eight bits. Headwater's has none: the
numbers are dropped."""
OF_OUTPUTS = ("output_scale", "output_zero_point")
"""Like `KV_SCALES`, where the projections of keys and values have them."""


class Format(Protocol):
    """A published format: a module."""

    def suffixes(self, packing: Packing) -> tuple[str, ...]:
        """Last parts of the names of a layer's tensors."""

    def drops(self, name: str, suffix: str, tensor: torch.Tensor, packing: Packing) -> bool:
        """Whether a tensor can be ignored. Raises `ConfigError` for an unsupported tensor that
        would change results."""

    def unpack(
        self, name: str, tensors: Mapping[str, torch.Tensor], packing: Packing
    ) -> GroupedWeight:
        """The weight of a layer's tensors by suffix. Raises `ConfigError` naming the tensor that
        does not fit."""


FORMATS: Mapping[str, Format] = {
    "awq": awq,
    "fp8": fp8,
    "gptq": gptq,
    "int_quantized": int_quantized,
    "mxfp4": mxfp4,
    "pack_quantized": pack_quantized,
}


def unpacked(
    tensors: Iterable[tuple[str, Weight]], quantization: Quantization | None
) -> Iterator[tuple[str, Weight]]:
    """The tensors of a checkpoint; those of a packed layer are one tensor, under the name that it
    has in unpacked checkpoints. Raises `ConfigError` for a packed layer with a missing tensor."""
    waiting: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors:
        layer, suffix, whole = _parts_of(name)
        # These belong to a layer's attention too, which no rule need name.
        if quantization is not None and suffix in (*KV_SCALES, *OF_OUTPUTS):
            continue
        packing = None if quantization is None else quantization.packing_of(layer)
        if packing is None or not isinstance(tensor, torch.Tensor):
            yield name, tensor
            continue
        format = FORMATS[packing.format]
        if format.drops(name, suffix, tensor, packing):
            continue
        if suffix not in format.suffixes(packing) or (
            suffix == "weight" and tensor.dtype in PLAIN_DTYPES
        ):
            yield name, tensor
            continue
        parts = waiting.setdefault(layer, {})
        parts[suffix] = tensor
        if len(parts) == len(format.suffixes(packing)):
            yield whole, format.unpack(layer, waiting.pop(layer), packing)
    for layer, parts in waiting.items():
        packing = quantization.packing_of(layer) if quantization is not None else None
        assert packing is not None
        missing = next(
            suffix for suffix in FORMATS[packing.format].suffixes(packing) if suffix not in parts
        )
        raise ConfigError(
            "checkpoint", f"without {_name_of(layer, missing)}", "every tensor of a packed layer"
        )


def _parts_of(name: str) -> tuple[str, str, str]:
    """The layer of a tensor, the last part of its name, and the name of the layer's weight where it
    is not packed. Of weights of all experts, the weight itself is the layer."""
    for ending in (mxfp4.BLOCKS, mxfp4.SCALES):
        if name.endswith(ending):
            layer = name.removesuffix(ending)
            return layer, ending, layer
    layer, _, suffix = name.rpartition(".")
    return layer, suffix, f"{layer}.weight"


def _name_of(layer: str, suffix: str) -> str:
    """The name of a layer's tensor."""
    return layer + suffix if suffix in (mxfp4.BLOCKS, mxfp4.SCALES) else f"{layer}.{suffix}"
