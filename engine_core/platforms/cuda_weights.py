"""Weights of an NVIDIA GPU: which stay packed when they are loaded, and what is made of them. Triton
is imported when they are, because a machine without a GPU may lack its dependencies."""

from __future__ import annotations

import torch

from headwater.kernels.quant.byte_weights import ByteWeight

from ..layers.leaf_matrix import keep_leaves
from ..layers.linear.kinds import Weights
from ..layers.staged import layer_of
from ..models.model import model_class
from ..options import BuildRequest, Progress
from ..weights.blocks import Parts
from ..weights.byte_weights import Keeps
from ..weights.model_file import DTYPES
from .stored_weights import StoredForms, StoredWeights


def _kept(request: BuildRequest, device: torch.device) -> Keeps:
    """Which weights of eight bits, or of a GGUF file, stay packed: of experts, not the latter."""
    layout = model_class(request.model).layout(request.model)
    experts = {name for name, spec in layout.items() if spec.num_experts}

    def keeps(name: str, weight: ByteWeight | Parts) -> bool:
        is_served = name not in experts or not isinstance(weight, tuple)
        return is_served and _keeps(request, device, name, weight)

    return keeps


def _keeps(
    request: BuildRequest, device: torch.device, name: str, weight: ByteWeight | Parts
) -> bool:
    """As `_kept`, of a weight that is not of experts. Of those of eight bits, embedding and head
    are read by kernels of their own."""
    from headwater.kernels.attention import hopper_attention  # noqa: PLC0415
    from headwater.kernels.gemm import byte_gemm, int4_gemm, w8a8  # noqa: PLC0415

    if isinstance(weight, tuple):
        return DTYPES[request.dtype] in int4_gemm.DTYPES
    if layer_of(name) is None:
        return False
    is_served = hopper_attention.is_hopper(device) and DTYPES[request.dtype] == torch.bfloat16
    return is_served and (
        byte_gemm.fits(weight)
        or (request.rounds_tokens and weight.rounds_tokens and w8a8.fits(weight))
    )


def stored_forms(request: BuildRequest) -> StoredForms:
    from headwater.kernels.gemm import int4_gemm  # noqa: PLC0415

    return StoredForms(
        keeps=_kept(request, torch.device("cuda")),
        in_planes=DTYPES[request.dtype] in int4_gemm.DTYPES,
        with_leaves=keep_leaves,
    )


def prepare_weights(stored: StoredWeights, progress: Progress) -> Weights:
    """Puts weights of eight bits into the order in which kernels read them."""
    from ..layers.linear.ordered import order_linears  # noqa: PLC0415
    from .cuda_packed import with_look_up  # noqa: PLC0415

    return order_linears(with_look_up(stored.weights), rounds_tokens=stored.request.rounds_tokens)
