"""Twin of the short convolution's kernels in plain torch, over a sequence from its first token
on."""

from __future__ import annotations

import torch

from .conv_layer import ConvLayer


def short_conv_twin(parts: torch.Tensor, layer: ConvLayer) -> torch.Tensor:
    """parts [T, 3 H]: gates of the inputs, gates of the outputs, and inputs of each token → [T, H]
    in float64. Gated inputs have the type of the parts."""
    before, behind, x = parts.chunk(3, dim=1)
    gated = (before * x).double()
    padded = torch.cat((gated.new_zeros(layer.unit.num_before, gated.shape[1]), gated))
    mixed = [padded[i : i + len(gated)] * tap for i, tap in enumerate(layer.taps.double())]
    return behind.double() * torch.stack(mixed).sum(0)
