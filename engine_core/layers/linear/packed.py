"""Weights as a CPU's kernels and its library read them: in an order of their own, made when a model
is loaded; a model's file has none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import torch

from headwater.kernels.cpu.packed_linear import (
    PackedLayout,
    can_pack,
    copy_packed,
    linear,
    num_bytes_of,
    pack,
    packed_view,
)

from ...weights.blocks import dense
from ...weights.packed import Matrix, packed_memory
from ..routing import ExpertStack
from .blocks import BlockLinear
from .dense import DenseLinear
from .fp8_tiles import FloatLinear, FloatWeight, Fp8TileLayout, Fp8TileLinear, write_fp8_tiles
from .group_tiles import IntWeight, TileLayout, TileLinear, write_tiles
from .int4 import Int4Linear
from .int8 import Int8Linear
from .kinds import Weights
from .linear import ExpandableLinear, Linear

Read = Callable[[], torch.Tensor]
Packed = tuple[Matrix, Callable[[torch.Tensor], Linear]]
LINE = 64
"""Bytes of a cache line."""


class PackedLinear(Linear):
    """Holds the memory that the library's tensor is a view of: the view itself does not."""

    kind = "packed"

    def __init__(self, memory: torch.Tensor, layout: PackedLayout) -> None:
        """memory uint8 [layout.num_bytes]"""
        self._memory = memory
        self.out_features, self.in_features = layout.shape
        self.weight = packed_view(memory, layout)
        """[N, K], opaque to everything but `kernels.cpu.packed_linear`."""

    def product(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weight)


class PackedExperts(Linear):
    """Matrices of one shape, one an expert, packed one by one, so that each is multiplied alone."""

    kind = "packed experts"

    def __init__(self, memory: torch.Tensor, layout: PackedLayout, num_experts: int) -> None:
        """memory uint8 [num_experts * stride_of(layout)]"""
        self._memory = memory
        self._layout = layout
        self._num_experts = num_experts
        self._num_outputs, self.in_features = layout.shape
        self.out_features = num_experts * self._num_outputs

    def outputs(self, rows: range) -> PackedLinear:
        """The outputs of one expert."""
        assert len(rows) == self._num_outputs
        first = rows.start // self._num_outputs * stride_of(self._layout)
        return PackedLinear(self._memory[first : first + self._layout.num_bytes], self._layout)

    def product(self, x: torch.Tensor) -> torch.Tensor:
        size = self._num_outputs
        experts = (self.outputs(range(i * size, i * size + size)) for i in range(self._num_experts))
        return torch.cat([each.product(x) for each in experts], dim=1)


def stride_of(layout: PackedLayout) -> int:
    """Bytes from one packed matrix to the next: each begins a cache line."""
    return -(-layout.num_bytes // LINE) * LINE


def pack_linears(
    weights: Weights,
    folder: Path | None,
    progress: Callable[[int, int], None],
    expanded_to: torch.dtype | None = None,
    part: str = "",
    *,
    expands_fp8: bool = False,
) -> Weights:
    """The weights with every matrix packed, where this machine can. Progress is reported in
    matrices. Those in block formats are expanded to a dtype and packed like the others, and so are
    integers in groups; None: these stay packed. `expands_fp8`: floating-point numbers of eight bits
    and of MXFP4 are expanded to the model's dtype.

    `folder` is the one that the weights were loaded from; there the packed matrices are kept. None:
    the weights come from no folder. `part` names the part of the folder's weights that these are;
    empty: all of them.
    """
    matrices: dict[str, Matrix] = {}
    made: dict[str, Callable[[torch.Tensor], Linear]] = {}
    others: dict[str, Linear] = {}
    joined = {name: stack.linear for name, stack in weights.experts.items()}
    for name, each in sorted({**weights.linears, **joined}.items()):
        if (tiles := _tiles(each, expanded_to is None, not expands_fp8)) is not None:
            matrices[name], made[name] = tiles
        elif (read := _dense(each, expanded_to)) is None:
            others[name] = each
        elif can_pack(dtype := _dtype(each, expanded_to)):
            stack = weights.experts.get(name)
            matrices[name], made[name] = _packed(each, read, dtype, stack)
        else:
            others[name] = DenseLinear(read())
    for name, memory in packed_memory(matrices, folder, progress, part).items():
        others[name] = made[name](memory)
    experts = {
        name: replace(stack, linear=others.pop(name)) for name, stack in weights.experts.items()
    }
    return replace(weights, linears=others, experts=experts)


def _packed(linear: Linear, read: Read, dtype: torch.dtype, stack: ExpertStack | None) -> Packed:
    """Matrix to pack in this dtype, and the function that makes a layer of its memory; a stack is
    packed expert by expert."""
    if stack is None:
        layout = layout_of((linear.out_features, linear.in_features), dtype)
        matrix = Matrix(layout, layout.num_bytes, partial(_write, read))
        return matrix, partial(PackedLinear, layout=layout)
    count = stack.num_experts
    layout = layout_of((stack.out_features, stack.in_features), dtype)
    stride = stride_of(layout)
    matrix = Matrix((layout, count), count * stride, partial(_write_experts, read, count))
    return matrix, partial(PackedExperts, layout=layout, num_experts=count)


layout_of = cache(PackedLayout.of)


def _write(read: Read, memory: torch.Tensor) -> None:
    copy_packed(pack(read()), memory)


def _write_experts(read: Read, num_experts: int, memory: torch.Tensor) -> None:
    weights = read().chunk(num_experts)
    for weight, own in zip(weights, memory.chunk(num_experts), strict=True):
        packed = pack(weight)
        copy_packed(packed, own[: num_bytes_of(packed)])


def _tiles(linear: Linear, keeps_integers: bool, keeps_fp8: bool) -> Packed | None:
    """Matrix to arrange in tiles, and the function that makes a layer of the tiles; None: the layer
    is not packed, or its weights cannot be arranged in tiles."""
    if keeps_fp8 and isinstance(linear, FloatLinear):
        return _fp8_tiles(linear.weight, linear.dtype)
    if keeps_integers and isinstance(linear, Int4Linear | Int8Linear):
        return _integer_tiles(linear.weight)
    return None


def _fp8_tiles(weight: FloatWeight, dtype: torch.dtype) -> Packed | None:
    if (layout := Fp8TileLayout.of(weight, dtype)) is None:
        return None
    return Matrix(layout, layout.num_bytes, partial(write_fp8_tiles, weight, layout)), partial(
        Fp8TileLinear, layout
    )


def _integer_tiles(weight: IntWeight) -> Packed | None:
    if (layout := TileLayout.of(weight)) is None:
        return None
    matrix = Matrix(layout, layout.num_bytes, partial(write_tiles, weight, layout))
    return matrix, partial(TileLinear, weight, layout)


def _dense(linear: Linear, expanded_to: torch.dtype | None) -> Read | None:
    """Reader of the layer's weights [N, K]; None: the layer has a product of its own."""
    if isinstance(linear, DenseLinear):
        return lambda: linear.weight
    if isinstance(linear, ExpandableLinear):
        return linear.expanded
    if isinstance(linear, BlockLinear) and expanded_to is not None:
        return partial(dense, linear.parts, expanded_to)
    return None


def _dtype(linear: Linear, expanded_to: torch.dtype | None) -> torch.dtype:
    if isinstance(linear, DenseLinear):
        return linear.weight.dtype
    if isinstance(linear, ExpandableLinear):
        return linear.dtype
    assert expanded_to is not None
    return expanded_to
