"""Operations of layers with states on an NVIDIA GPU."""

from __future__ import annotations

import torch

from headwater.kernels.conv.conv_layer import ConvLayer
from headwater.kernels.conv.short_conv import short_conv
from headwater.kernels.delta.delta_arguments import DeltaLayer
from headwater.kernels.delta.delta_net import delta_net
from headwater.kernels.mamba.mamba import mamba
from headwater.kernels.mamba.mamba_layer import MambaLayer
from headwater.kernels.states.state_memory import StateMemory

from ..cuda_products import EARLY_ROWS


class CudaStates:
    """See `StatePlatform`, `ConvPlatform` and `MambaPlatform`."""

    has_drafts: bool
    """Whether drafted tokens are separate rows after those that they follow."""

    def delta_net(
        self, wide: torch.Tensor, narrow: torch.Tensor, layer: DeltaLayer, memory: StateMemory
    ) -> torch.Tensor:
        return delta_net(
            wide,
            narrow,
            layer,
            memory,
            are_neighbours=self.has_drafts,
            dependent=len(wide) <= EARLY_ROWS,
        )

    def short_conv(
        self, parts: torch.Tensor, layer: ConvLayer, memory: StateMemory
    ) -> torch.Tensor:
        return short_conv(parts, layer, memory, are_neighbours=self.has_drafts)

    def mamba(self, parts: torch.Tensor, layer: MambaLayer, memory: StateMemory) -> torch.Tensor:
        return mamba(parts, layer, memory, are_neighbours=self.has_drafts)
