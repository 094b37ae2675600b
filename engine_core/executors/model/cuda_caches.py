"""KV caches on a GPU, whose blocks are copied."""

from __future__ import annotations

import numpy as np

from headwater.kernels.blocks.copy_blocks import copy_blocks
from headwater.kernels.launch.device import upload

from ...executor import Int32Array
from .kv_blocks import KvBlocks


class CudaCaches:
    """See `Caches`."""

    def __init__(self, blocks: KvBlocks) -> None:
        self.kv_caches = blocks.kv_caches
        self._words = blocks.words

    def copy(self, pairs: Int32Array) -> None:
        if not pairs.size:
            return
        device = self._words.device
        sources, targets = (upload(np.ascontiguousarray(each), device) for each in pairs.T)
        copy_blocks(self._words, self._words, sources, targets)

    def rehearse(self) -> None:
        """Launches a copy of block 0, which no request holds, onto itself."""
        self.copy(np.zeros((1, 2), np.int32))
