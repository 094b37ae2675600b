"""KV caches whose blocks are copied by plain torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...executor import Int32Array


class EagerCaches:
    """See `Caches`."""

    def __init__(self, kv_caches: Sequence[torch.Tensor]) -> None:
        self.kv_caches = kv_caches

    def copy(self, pairs: Int32Array) -> None:
        if not len(pairs):
            return
        sources, targets = torch.from_numpy(pairs).long().unbind(1)
        for cache in self.kv_caches:
            cache[:, :, targets] = cache[:, :, sources]
