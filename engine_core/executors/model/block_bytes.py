"""Sizes of KV blocks in bytes, by what a request of a platform asks for."""

from __future__ import annotations

import torch

from ...options import BuildRequest
from ...weights.model_file import DTYPES

KV_DTYPES = DTYPES | {"fp8": torch.float8_e4m3fn}


def block_bytes_of(request: BuildRequest) -> int:
    """The bytes of one KV block: planes of the model, and those of the model or the heads that
    draft."""
    return served_bytes_of(request) + draft_bytes_of(request)


def cache_bytes_of(request: BuildRequest) -> int:
    """The bytes that a block takes in the KV caches of all ranks: each has a part of the served
    model's planes, and all planes of what drafts."""
    return served_bytes_of(request) + request.options.tensor_parallel_size * draft_bytes_of(request)


def served_bytes_of(request: BuildRequest) -> int:
    """The bytes of the served model's planes of one KV block."""
    elements = request.model.kv_elements_per_token * request.options.block_size
    return elements * KV_DTYPES[request.kv_format].itemsize


def draft_bytes_of(request: BuildRequest) -> int:
    """The bytes of the planes of one KV block that belong to what drafts; 0: nothing does."""
    if request.draft is not None:
        return served_bytes_of(request.draft)
    if request.heads is None:
        return 0
    return (
        request.heads.kv_elements_per_token
        * request.options.block_size
        * DTYPES[request.dtype].itemsize
    )
