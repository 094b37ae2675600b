"""Weights on an NVIDIA GPU: which of them stay packed when they are loaded, and their layouts.
Imports Triton late, since a machine without a GPU may lack its dependencies."""

from __future__ import annotations

from functools import partial

import torch

from headwater.kernels.quant.mxfp4 import Mxfp4Weight

from ..layers.leaf_matrix import keep_leaves
from ..layers.linear.kinds import Weights
from ..layers.staged import layer_of
from ..options import BuildRequest, Progress
from ..weights.byte_weights import Kept
from ..weights.model_file import DTYPES
from .stored_weights import StoredForms, StoredWeights


def _keeps(request: BuildRequest, device: torch.device, name: str, weight: Kept) -> bool:
    """Whether a weight of eight bits, in MXFP4 or of a GGUF file stays packed. Of those of eight
    bits, embedding and head are read by kernels of their own."""
    from headwater.kernels.attention import hopper_attention  # noqa: PLC0415
    from headwater.kernels.gemm import byte_gemm, int4_gemm, w8a8  # noqa: PLC0415

    if isinstance(weight, tuple):
        return DTYPES[request.dtype] in int4_gemm.DTYPES
    if layer_of(name) is None:
        return False
    is_served = hopper_attention.is_hopper(device) and DTYPES[request.dtype] == torch.bfloat16
    if isinstance(weight, Mxfp4Weight):
        return is_served
    return is_served and (
        byte_gemm.fits(weight)
        or (request.rounds_tokens and weight.rounds_tokens and w8a8.fits(weight))
    )


def stored_forms(request: BuildRequest) -> StoredForms:
    from headwater.kernels.gemm import int4_gemm  # noqa: PLC0415

    return StoredForms(
        keeps=partial(_keeps, request, torch.device("cuda")),
        expands_expert_blocks=True,
        in_planes=DTYPES[request.dtype] in int4_gemm.DTYPES,
        with_leaves=keep_leaves,
    )


def prepare_weights(stored: StoredWeights, progress: Progress) -> Weights:
    """Puts weights of eight bits into the order in which kernels read them."""
    from ..layers.linear.ordered import order_linears  # noqa: PLC0415
    from .cuda_packed import with_look_up  # noqa: PLC0415

    return order_linears(with_look_up(stored.weights), rounds_tokens=stored.request.rounds_tokens)
