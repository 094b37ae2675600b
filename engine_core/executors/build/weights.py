"""Weights of a whole model on a device, from its folder or random, and of draft heads."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from ...heads.heads_config import MTP, HeadsConfig
from ...heads.registry import load_heads
from ...layers.linear import kinds
from ...layers.linear.kinds import Weights
from ...models.model import model_class
from ...models.mtp import mtp_layout
from ...options import BuildRequest, Progress
from ...platforms.stored_weights import StoredForms
from ...weights import model_file
from ...weights.byte_weights import Keeps, Kept, keeps_none
from ...weights.draft_layer import DRAFT_WEIGHTS_NAME
from ...weights.dummy import DUMMIES, dummy
from ...weights.layout import Layout
from ...weights.model_file import DTYPES, Tensors
from ...weights.padded_heads import pad_heads
from ...weights.planes import put_all_in_planes
from ...weights.shards import WHOLE, Shard


def load_weights(
    request: BuildRequest, device: torch.device, progress: Progress, forms: StoredForms
) -> Weights:
    """Weights of the model folder, or random ones where the load format says so. Raises
    `ConfigError`."""
    layout = model_class(request.model).layout(request.model)
    loading = partial(progress, "loading weights")
    if request.is_tree:
        tensors = stored_tensors(request, device, loading, keeps_packed=False)
        weights = kinds.load_weights(layout, tensors, DTYPES[request.dtype])
        return forms.with_leaves(weights, layout, WHOLE)
    tensors = stored_tensors(
        request, device, loading, keeps_packed=forms.keeps_packed, keeps=keeps_of(layout, forms)
    )
    if forms.in_planes:
        put_all_in_planes(tensors)
    return kinds.load_weights(layout, tensors, DTYPES[request.dtype])


def keeps_of(layout: Layout, forms: StoredForms) -> Keeps:
    """Which weights of a layout stay packed in the forms of a platform."""
    if not forms.expands_expert_blocks:
        return forms.keeps
    experts = {name for name, spec in layout.items() if spec.num_experts}

    def keeps(name: str, weight: Kept) -> bool:
        is_expanded = name in experts and isinstance(weight, tuple)
        return not is_expanded and forms.keeps(name, weight)

    return keeps


def stored_tensors(
    request: BuildRequest,
    device: torch.device,
    loading: Callable[[int, int], None],
    *,
    keeps_packed: bool,
    keeps: Keeps = keeps_none,
) -> Tensors:
    """The tensors of the whole model as its file holds them."""
    options = request.options
    assert options.model_folder is not None
    if options.load_format == "auto":
        tensors = model_file.load(
            options.model_folder, device, loading, keeps_packed=keeps_packed, keeps=keeps
        )
        pad_heads(tensors, request.model)
        return tensors
    loading(0, 1)
    tensors = random_tensors(
        request,
        model_class(request.model).layout(request.model),
        device,
        keeps_packed=keeps_packed,
        keeps=keeps,
    )
    loading(1, 1)
    return tensors


def random_tensors(
    request: BuildRequest,
    layout: Layout,
    device: torch.device,
    *,
    keeps_packed: bool,
    keeps: Keeps = keeps_none,
) -> Tensors:
    """Random tensors of the weights of a layout."""
    dtype = DTYPES[request.dtype]
    uniform = DUMMIES[request.options.load_format]
    tensors = dummy(layout, dtype, device, uniform=uniform, quantization=request.model.quantization)
    if not keeps_packed:
        model_file.expand_all(tensors, dtype, keeps)
    return tensors


def load_heads_weights(
    request: BuildRequest, device: torch.device, shard: Shard = WHOLE
) -> Weights:
    """Weights of the draft heads; on a rank with its part of their vocabulary. Raises
    `ConfigError`."""
    assert request.heads is not None
    if request.heads.kind == MTP:
        return _load_draft_layer(request, request.heads, device)
    folder = request.options.draft_heads
    assert folder is not None
    return load_heads(folder, request.heads, request.model, DTYPES[request.dtype], device, shard)


def _load_draft_layer(request: BuildRequest, heads: HeadsConfig, device: torch.device) -> Weights:
    """Weights of the layer with which the served model's checkpoint drafts, expanded to the model's
    dtype."""
    assert heads.layer is not None
    folder = request.options.model_folder
    assert folder is not None
    layout = mtp_layout(heads.layer)
    if request.options.load_format == "auto":
        tensors = model_file.load(folder, device, name=DRAFT_WEIGHTS_NAME)
    else:
        tensors = random_tensors(request, layout, device, keeps_packed=False)
    return kinds.load_weights(layout, tensors, DTYPES[request.dtype])
