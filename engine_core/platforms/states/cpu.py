"""Operations of layers with states on a CPU."""

from __future__ import annotations

import torch

from headwater.kernels.conv.conv_layer import ConvLayer
from headwater.kernels.cpu.delta.delta_net import delta_net
from headwater.kernels.cpu.states.mamba import mamba
from headwater.kernels.cpu.states.short_conv import short_conv
from headwater.kernels.delta.delta_arguments import DeltaLayer
from headwater.kernels.mamba.mamba_layer import MambaLayer
from headwater.kernels.states.state_memory import StateMemory


class CpuStates:
    """See `StatePlatform`, `ConvPlatform` and `MambaPlatform`."""

    def delta_net(
        self, wide: torch.Tensor, narrow: torch.Tensor, layer: DeltaLayer, memory: StateMemory
    ) -> torch.Tensor:
        return delta_net(wide, narrow, layer, memory)

    def short_conv(
        self, parts: torch.Tensor, layer: ConvLayer, memory: StateMemory
    ) -> torch.Tensor:
        return short_conv(parts, layer, memory)

    def mamba(self, parts: torch.Tensor, layer: MambaLayer, memory: StateMemory) -> torch.Tensor:
        return mamba(parts, layer, memory)
