"""Operations of layers with states on a CPU."""

from __future__ import annotations

import torch

from headwater.kernels.cpu.delta.delta_net import delta_net
from headwater.kernels.delta.delta_arguments import DeltaLayer, StateMemory


class CpuStates:
    """See `StatePlatform`."""

    def delta_net(
        self, wide: torch.Tensor, narrow: torch.Tensor, layer: DeltaLayer, memory: StateMemory
    ) -> torch.Tensor:
        return delta_net(wide, narrow, layer, memory)
