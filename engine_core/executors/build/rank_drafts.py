"""The weights of what drafts on a rank.

Every rank computes all layers of a draft model or of heads, so no pass waits for another rank.
Ranks divide the vocabulary heads alone, the largest matrices, and the draw of a guess joins each
rank's best token: all ranks take the same one, whatever the last bits of a rank's own pass are, and
their steps stay equal.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from ...layers.linear import kinds
from ...layers.linear.kinds import Weights, keeps_divided
from ...models.model import model_class
from ...options import BuildRequest, Progress
from ...weights.byte_weights import keeps_none
from ...weights.layout import Layout, Split
from ...weights.model_file import DTYPES
from ...weights.planes import in_planes as as_planes
from ...weights.shards import Shard
from .single import stored_tensors

HEAD = "lm_head"


def draft_layout(request: BuildRequest) -> Layout:
    """The layout of a draft model of which ranks divide nothing but the vocabulary head."""
    layout = model_class(request.model).layout(request.model)
    return {
        name: spec if name == HEAD else replace(spec, split=Split.NONE)
        for name, spec in layout.items()
    }


def load_draft_weights(
    request: BuildRequest,
    shard: Shard,
    device: torch.device,
    progress: Progress,
    *,
    keeps_packed: bool = False,
    in_planes: bool = False,
) -> Weights:
    """As `rank.load_rank_weights`, of a draft model with this rank's rows of its vocabulary
    head. Raises `ConfigError`."""
    # Tensors of a file are mapped; random ones are made where they are used.
    source = torch.device("cpu") if request.options.load_format == "auto" else device
    layout = draft_layout(request)
    loading = partial(progress, "loading weights")
    keeps = keeps_divided(layout, shard) if in_planes else keeps_none
    tensors = stored_tensors(request, source, loading, keeps_packed=keeps_packed, keeps=keeps)
    return kinds.load_weights(
        layout, tensors, DTYPES[request.dtype], shard, device, as_planes if in_planes else None
    )
