"""Linear layers of four bits on their way from a checkpoint to a model's file. Knows no published format: each has a
file of its own beside this one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch

from headwater.kernels.block_formats import BlockWeight
from headwater.kernels.int4_layout import BLOCK, WORD, Int4Weight

from ..config import ConfigError
from .model_file import Tensors

WORDS, SCALES, ZEROS, GROUPS = ".int4", ".scales", ".zeros", ".groups"
"""Names of the tensors in a model's file, behind the layer's."""
SCALE_DTYPES = (torch.float16, torch.bfloat16)
"""Their products with a weight minus its zero point are exact in float32."""


def named(weight: Int4Weight, name: str) -> Tensors:
    """The tensors of a weight as a model's file holds them."""
    tensors = {WORDS: weight.words, SCALES: weight.scales, ZEROS: weight.zeros}
    if weight.groups is not None:
        tensors[GROUPS] = weight.groups
    return {name + suffix: tensor.contiguous() for suffix, tensor in tensors.items()}


def joined(name: str, parts: Sequence[Int4Weight]) -> Int4Weight:
    """The outputs of all parts, in their order. Raises `ConfigError` where their inputs are grouped otherwise."""
    first = parts[0]
    for part in parts[1:]:
        if len(part.scales) != len(first.scales) or part.words.shape[1] != first.words.shape[1]:
            sizes = [each.words.shape[1] * WORD / len(each.scales) for each in parts]
            raise ConfigError(f"group sizes of the parts of {name}", sizes, "one size")
        if part.scales.dtype != first.scales.dtype:
            dtypes = [str(each.scales.dtype) for each in parts]
            raise ConfigError(f"dtypes of the scales of the parts of {name}", dtypes, "one dtype")
        if not _are_equal(part.groups, first.groups):
            raise ConfigError(f"g_idx of the parts of {name}", "different", "the same for all of them")
    return Int4Weight(
        words=torch.cat([part.words for part in parts]),
        scales=torch.cat([part.scales for part in parts], dim=1),
        zeros=torch.cat([part.zeros for part in parts], dim=1),
        groups=first.groups,
    )


def _are_equal(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    return a is b if a is None or b is None else torch.equal(a, b)


Unpack = Callable[[str, Mapping[str, torch.Tensor]], Int4Weight]
"""The weight made of a layer's published tensors by suffix; the layer's name is for errors."""


def unpacked(
    tensors: Iterable[tuple[str, torch.Tensor | BlockWeight]], suffixes: Sequence[str], unpack: Unpack
) -> Iterator[tuple[str, torch.Tensor | BlockWeight | Int4Weight]]:
    """The tensors of a checkpoint, those of a packed layer as one under the name that it has in other checkpoints.
    Raises `ConfigError` for a layer without one of the suffixes."""
    waiting: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors:
        layer, _, suffix = name.rpartition(".")
        if suffix not in suffixes or isinstance(tensor, BlockWeight):
            yield name, tensor
            continue
        parts = waiting.setdefault(layer, {})
        parts[suffix] = tensor
        if len(parts) == len(suffixes):
            yield f"{layer}.weight", unpack(layer, waiting.pop(layer))
    for layer, parts in waiting.items():
        missing = next(suffix for suffix in suffixes if suffix not in parts)
        raise ConfigError("checkpoint", f"without {layer}.{missing}", "every tensor of a packed layer")


def check_shape(name: str, tensor: torch.Tensor, shape: tuple[int, ...], *dtypes: torch.dtype) -> None:
    """Raises `ConfigError`."""
    if tuple(tensor.shape) != shape:
        raise ConfigError(f"checkpoint tensor {name}", tuple(tensor.shape), str(shape))
    if tensor.dtype not in dtypes:
        raise ConfigError(f"dtype of tensor {name}", str(tensor.dtype), " or ".join(map(str, dtypes)))


def num_groups(name: str, num_inputs: int, group_size: int) -> int:
    """Returns how many groups of this size the inputs make, -1 for all of them at once. Raises `ConfigError`."""
    size = num_inputs if group_size == -1 else group_size
    if num_inputs % BLOCK or num_inputs % size:
        raise ConfigError(f"number of inputs of {name}", num_inputs, f"multiples of {max(size, BLOCK)}")
    return num_inputs // size


def nibbles_of(words: torch.Tensor) -> torch.Tensor:
    """int32 [..., W] → uint8 [..., W, 8], the lowest four bits first."""
    pairs = words.contiguous().view(torch.uint8).view(*words.shape, 4)
    return torch.stack((pairs & 15, pairs >> 4), dim=-1).flatten(-2)
