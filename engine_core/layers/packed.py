"""Weights as the CPU's library reads them: dense, in an order of its own. Made when a model is loaded, of dense weights
and of those of few bits; a model's file has none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from headwater.kernels.packed_linear import PackedLayout, can_pack, linear, packed_view

from ..weights.blocks import dense
from ..weights.packed import Matrix, packed_memory
from .blocks import BlockLinear
from .dense import DenseLinear
from .kinds import Weights
from .linear import ExpandableLinear, Linear


class PackedLinear(Linear):
    """Holds the memory that the library's tensor is a view of: the view itself does not."""

    kind = "packed"

    def __init__(self, memory: torch.Tensor, layout: PackedLayout) -> None:
        """memory uint8 [layout.num_bytes]"""
        self._memory = memory
        self.out_features, self.in_features = layout.shape
        self.weight = packed_view(memory, layout)
        """[N, K], opaque to everything but `kernels.packed_linear`."""

    def product(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weight)


def pack_linears(
    weights: Weights,
    folder: Path | None,
    progress: Callable[[int, int], None],
    expanded_to: torch.dtype | None = None,
) -> Weights:
    """The weights with every matrix packed, where this machine can. Progress is told in matrices. Those in block
    formats are expanded to a dtype and packed like the others; None: they stay as they are.

    `folder` is the one that the weights were loaded from; there the packed matrices are kept. None: the weights come
    from no folder.
    """
    known = {name: _matrix(linear, expanded_to) for name, linear in sorted(weights.linears.items())}
    matrices = {name: matrix for name, matrix in known.items() if matrix is not None}
    packable = {name: matrix for name, matrix in matrices.items() if can_pack(matrix.dtype)}
    packed = {name: PackedLinear(*at) for name, at in packed_memory(packable, folder, progress).items()}
    others = {name: DenseLinear(matrix.read()) for name, matrix in matrices.items() if name not in packable}
    return replace(weights, linears={**weights.linears, **others, **packed})


def _matrix(linear: Linear, expanded_to: torch.dtype | None) -> Matrix | None:
    """The layer's weights; None: it has a product of its own."""
    shape = linear.out_features, linear.in_features
    if isinstance(linear, DenseLinear):
        return Matrix(shape, linear.weight.dtype, lambda: linear.weight)
    if isinstance(linear, ExpandableLinear):
        return Matrix(shape, linear.dtype, linear.expanded)
    if isinstance(linear, BlockLinear) and expanded_to is not None:
        return Matrix(shape, expanded_to, partial(dense, linear.parts, expanded_to))
    return None
