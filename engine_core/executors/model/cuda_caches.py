"""KV caches on a GPU, whose blocks are copied."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from headwater.kernels.blocks.copy_blocks import as_planes, copy_blocks
from headwater.kernels.launch.device import upload

from ...executor import Int32Array


class CudaCaches:
    """See `Caches`."""

    def __init__(self, kv_caches: Sequence[torch.Tensor]) -> None:
        self.kv_caches = kv_caches
        self._planes = [as_planes(each) for each in kv_caches]

    def copy(self, pairs: Int32Array) -> None:
        if not pairs.size:
            return
        device = self.kv_caches[0].device
        sources, targets = (upload(np.ascontiguousarray(each), device) for each in pairs.T)
        for planes in self._planes:
            copy_blocks(planes, planes, sources, targets)

    def rehearse(self) -> None:
        """Launches a copy of block 0, which no request holds, onto itself."""
        self.copy(np.zeros((1, 2), np.int32))
