"""Operations of layers with states on an NVIDIA GPU."""

from __future__ import annotations

import torch

from headwater.kernels.delta.delta_arguments import DeltaLayer, StateMemory
from headwater.kernels.delta.delta_net import delta_net


class CudaStates:
    """See `StatePlatform`."""

    has_drafts: bool
    """Whether drafted tokens are rows beside those that they follow."""

    def delta_net(
        self, wide: torch.Tensor, narrow: torch.Tensor, layer: DeltaLayer, memory: StateMemory
    ) -> torch.Tensor:
        return delta_net(wide, narrow, layer, memory, are_neighbours=self.has_drafts)
