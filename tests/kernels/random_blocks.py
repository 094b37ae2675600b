"""Random weights in block formats, as a GGUF file holds them."""

from __future__ import annotations

import numpy as np
import torch

from headwater.kernels.quant.block_formats import BlockFormat


def random_rows(format: BlockFormat, num_rows: int, num_inputs: int, seed: int = 0) -> torch.Tensor:
    """uint8 [N, K / unit * unit_bytes]: random bits between finite scales."""
    rng = np.random.default_rng(seed)
    shape = num_rows, num_inputs // format.unit
    units = rng.integers(0, 256, (*shape, format.unit_bytes), dtype=np.uint8)
    # Q6_K ends with its scale, the others begin with it.
    first = format.unit_bytes - 2 if format.name == "q6_k" else 0
    for at in (first, first + 2) if format.has_min else (first,):
        scales = (rng.normal(size=shape) * 0.02).astype(np.float16)
        units[:, :, at : at + 2] = scales.view(np.uint8).reshape(*shape, 2)
    return torch.from_numpy(units.reshape(num_rows, -1))
