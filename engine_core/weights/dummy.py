"""Random weights, for measuring models whose weights are not at hand."""

from __future__ import annotations

import torch

from headwater.kernels.int4_layout import WORD, Int4Weight

from ..quantization import Quantization
from .int4 import named, num_groups
from .layout import Layout
from .model_file import Tensors

DUMMIES = {"dummy": False, "dummy-uniform": True}
"""Names of random weights, and whether they are uniform."""
UNIFORM_SPREAD = 1e-3
"""As vLLM's loader makes random weights. Numbers so small move fewer wires: a GPU at its limit of power computes them
faster than those of a trained model, so a comparison with such figures needs the same."""
NORMAL_SPREAD = 0.02
HEAD = "lm_head"
"""Never packed, nor are tensors outside the layers."""


def dummy(
    layout: Layout,
    dtype: torch.dtype,
    device: torch.device,
    seed: int = 0,
    *,
    uniform: bool = False,
    quantization: Quantization | None = None,
) -> Tensors:
    """Random weights of the right shapes: normal ones, scaled so that activations stay finite, between norms of one;
    or all of them, norms too, uniform within `UNIFORM_SPREAD`. With a quantization, linear layers are of random bits.
    """
    generator = torch.Generator(device).manual_seed(seed)
    tensors: Tensors = {}
    for name, spec in layout.items():
        if spec.tied_to:
            continue
        if quantization is not None and spec.is_linear and name != HEAD:
            weight = _int4(name, spec.shape, quantization.group_size, device, generator)
            tensors |= named(weight, name)
            continue
        tensors[name] = tensor = torch.empty(spec.shape, dtype=dtype, device=device)
        if uniform:
            tensor.uniform_(-UNIFORM_SPREAD, UNIFORM_SPREAD, generator=generator)
        elif spec.is_norm:
            tensor.fill_(1.0)
        else:
            tensor.normal_(0, NORMAL_SPREAD, generator=generator)
    return tensors


def _int4(
    name: str, shape: tuple[int, ...], group_size: int, device: torch.device, generator: torch.Generator
) -> Int4Weight:
    """Symmetric weights, uniform within about `NORMAL_SPREAD`."""
    n, k = shape
    of_groups = num_groups(name, k, group_size), n
    words = torch.empty(n, k // WORD, dtype=torch.int32, device=device)
    words.random_(-(1 << 31), 1 << 31, generator=generator)
    scales = torch.full(of_groups, NORMAL_SPREAD / 4, dtype=torch.float16, device=device)
    return Int4Weight(words=words, scales=scales, zeros=torch.full_like(scales, 8, dtype=torch.uint8))
