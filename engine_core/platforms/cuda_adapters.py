"""Low-rank adapters of rows on an NVIDIA GPU."""

from __future__ import annotations

from collections.abc import Callable

import torch

from headwater.kernels.adapters.adapter_tiles import AdapterTiles, adapter_tiles
from headwater.kernels.adapters.add_adapters import add_adapters
from headwater.kernels.adapters.slab import Slab, SlabLayer

from .cuda_products import EARLY_ROWS


class CudaAdapters:
    """See `AdapterPlatform`."""

    def plan_adapters(self, slots: torch.Tensor, slab: Slab) -> AdapterTiles:
        return adapter_tiles(slots, len(slab.num_ranks))

    def adapter_addition(
        self, slab: Slab, layer: SlabLayer
    ) -> Callable[[torch.Tensor, torch.Tensor, AdapterTiles], None]:
        def addition(x: torch.Tensor, y: torch.Tensor, tiles: AdapterTiles) -> None:
            add_adapters(x, y, tiles, slab, layer, dependent=len(x) <= EARLY_ROWS)

        return addition
