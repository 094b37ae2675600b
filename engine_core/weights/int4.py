"""Linear layers of four bits in a model's file."""

from __future__ import annotations

import torch

from headwater.kernels.int4_layout import Int4Weight, without_zeros

from .grouped import GROUPS, SCALES, ZEROS

WORDS = ".int4"
"""Name of packed numbers of four bits, behind the layer's."""


def named(weight: Int4Weight, name: str) -> dict[str, torch.Tensor]:
    """The tensors of a weight as a model's file holds them. Symmetric weights have no zero points there."""
    weight = without_zeros(weight)
    tensors = {WORDS: weight.words, SCALES: weight.scales}
    if weight.zeros is not None:
        tensors[ZEROS] = weight.zeros
    if weight.groups is not None:
        tensors[GROUPS] = weight.groups
    return {name + suffix: tensor.contiguous() for suffix, tensor in tensors.items()}
