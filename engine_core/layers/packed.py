"""Dense weights in the order that the CPU's library reads. Made when a model is loaded; a model's file has none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from headwater.engine_core.layers.dense import DenseLinear
from headwater.engine_core.layers.kinds import Weights
from headwater.engine_core.layers.linear import Linear
from headwater.engine_core.weights.packed import packed_memory
from headwater.kernels.packed_linear import PackedLayout, can_pack, linear, packed_view


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


def pack_linears(weights: Weights, folder: Path | None, progress: Callable[[int, int], None]) -> Weights:
    """The weights with every dense matrix packed, where this machine can. Progress is told in matrices.

    `folder` is the one that the weights were loaded from; there the packed matrices are kept. None: the weights come
    from no folder.
    """
    dense = {
        name: linear.weight
        for name, linear in sorted(weights.linears.items())
        if isinstance(linear, DenseLinear) and can_pack(linear.weight.dtype)
    }
    packed = {name: PackedLinear(*at) for name, at in packed_memory(dense, folder, progress).items()}
    return Weights(linears={**weights.linears, **packed}, tensors=weights.tensors)
