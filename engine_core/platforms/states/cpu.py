"""Operations of models with states on a CPU."""

from __future__ import annotations

import torch

from headwater.kernels.cpu.delta.delta_net import delta_net
from headwater.kernels.delta.delta_arguments import DeltaLayer, StateMemory

from ..cpu_products import CpuProducts
from ..encoders.cpu import CpuTexts


class CpuStates(CpuTexts):
    """See `StatePlatform`."""

    def __init__(self, products: CpuProducts, block_size: int) -> None:
        super().__init__(products)
        self.block_size = block_size

    def delta_net(
        self,
        wide: torch.Tensor,
        narrow: torch.Tensor,
        layer: DeltaLayer,
        memory: StateMemory,
    ) -> torch.Tensor:
        return delta_net(wide, narrow, layer, memory)
