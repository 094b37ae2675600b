"""KV caches whose blocks are copied by plain torch."""

from __future__ import annotations

import torch

from ...executor import Int32Array
from .kv_blocks import KvBlocks


class EagerCaches:
    """See `Caches`."""

    def __init__(self, blocks: KvBlocks) -> None:
        self.kv_caches = blocks.kv_caches
        self._memory = blocks.memory

    def copy(self, pairs: Int32Array) -> None:
        if not len(pairs):
            return
        sources, targets = torch.from_numpy(pairs).long().unbind(1)
        self._memory[targets] = self._memory[sources]
