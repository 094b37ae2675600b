"""The executor of one rank: any platform's ranks are made of these parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from ...config import EngineConfig
from ...executor import Executor
from ...layers.leaves import WithLeaves, cut_leaves, of_leaves
from ...layers.linear import kinds
from ...layers.linear.kinds import Table, Weights, keeps_divided
from ...layers.linear.linear import Linear
from ...layers.platform import Platform
from ...layers.routing import ExpertStack
from ...layers.sharded import ShardedEmbedding, over_group
from ...layers.sharded_sampling import ShardedSampling
from ...layers.staged import local_names, stage_layout, stage_weights
from ...models.model import Model, model_class
from ...options import BuildRequest, Progress
from ...sampling.operations import PartSampling
from ...sampling.sampler import Sampler
from ...weights.byte_weights import Keeps, keeps_none
from ...weights.layout import Layout
from ...weights.model_file import DTYPES
from ...weights.planes import in_planes as as_planes
from ..model.block_bytes import block_bytes_of
from ..ranks.rank_place import RankPlace, block_part, map_slots
from ..ranks.stage_link import StageEnds
from ..tiers.memory_swapper import MemorySwapper
from .eager import Drafting, Loaded, Stage, eager_executor
from .single import random_tensors, stored_tensors


def _weight_of(tensor_name: str, layout: Layout) -> str:
    """The weight that a tensor of a model's file belongs to, or its own name where it belongs to
    none."""
    return tensor_name if tensor_name in layout else tensor_name.rpartition(".")[0]


def load_rank_weights(
    request: BuildRequest,
    place: RankPlace,
    device: torch.device,
    progress: Progress,
    *,
    keeps_packed: bool = False,
    keeps_bytes: Keeps = keeps_none,
    in_planes: bool = False,
    with_leaves: WithLeaves = cut_leaves,
) -> Weights:
    """As `single.load_weights`, of this rank alone. Nothing else is read of a folder's tensors,
    which are mapped. `in_planes`: weights in block formats whose parts are whole in blocks become
    planes, others are expanded, and so are those of eight bits, unless `keeps_bytes` keeps the
    parts of all ranks. Raises `ConfigError`."""
    layout = model_class(request.model).layout(request.model)
    dtype = DTYPES[request.dtype]
    own = stage_layout(layout, place.stage)
    others = layout.keys() - stage_layout(layout, place.stage).keys()
    sources = {spec.tied_to or name for name, spec in own.items()}
    # The source of a tied weight is there for it alone.
    wanted = {**own, **{name: layout[name] for name in others & sources}}
    keeps_packed = keeps_packed and not request.is_tree
    in_planes = in_planes and not request.is_tree
    loading = partial(progress, "loading weights")
    keeps = keeps_divided(layout, place.shard, keeps_bytes) if in_planes else keeps_none
    if request.options.load_format == "auto":
        tensors = stored_tensors(
            request, torch.device("cpu"), loading, keeps_packed=keeps_packed, keeps=keeps
        )
        elsewhere = {name for name in others if name not in sources}
        kept = {
            name: tensor
            for name, tensor in tensors.items()
            if _weight_of(name, layout) not in elsewhere
        }
        part = kinds.load_weights(
            wanted, kept, dtype, place.shard, device, as_planes if in_planes else None
        )
    else:
        part = _random_weights(
            request, place, wanted, device, loading, keeps_packed=keeps_packed, keeps=keeps
        )
    weights = stage_weights(part, layout, place.stage, dtype)
    return (
        with_leaves(weights, local_names(layout, place.stage), place.shard)
        if request.is_tree
        else weights
    )


def _random_weights(
    request: BuildRequest,
    place: RankPlace,
    wanted: Layout,
    device: torch.device,
    loading: Callable[[int, int], None],
    *,
    keeps_packed: bool,
    keeps: Keeps,
) -> Weights:
    """Random weights, made where they are used and one whole weight at a time: all of them may be
    more than a device holds."""
    linears: dict[str, Linear] = {}
    tensors: dict[str, torch.Tensor] = {}
    tables: dict[str, Table] = {}
    experts: dict[str, ExpertStack] = {}
    sources = [name for name, spec in wanted.items() if not spec.tied_to]
    for done, source in enumerate(sources, start=1):
        one = {name: spec for name, spec in wanted.items() if source in (name, spec.tied_to)}
        whole = random_tensors(request, one, device, keeps_packed=keeps_packed, keeps=keeps)
        part = kinds.load_weights(one, whole, DTYPES[request.dtype], place.shard, device)
        linears |= dict(part.linears)
        tensors |= dict(part.tensors)
        tables |= dict(part.tables)
        experts |= dict(part.experts)
        loading(done, len(sources))
    return Weights(linears=linears, tensors=tensors, tables=tables, experts=experts)


def rank_executor(
    request: BuildRequest,
    place: RankPlace,
    config: EngineConfig,
    platform: Platform,
    weights: Weights,
    *,
    draft: Loaded | None = None,
    heads: Loaded | None = None,
) -> Executor:
    """As `single_executor`, over this rank's weights; `draft` and `heads` have its part of their
    vocabulary, see `rank_drafts`."""
    return eager_executor(
        request,
        config,
        platform,
        rank_model(request, place, config.max_model_len, platform, weights),
        Drafting(draft=draft, heads=heads, shard=place.shard),
        new_swapper=partial(_swapper, request, place, config),
        sampler=_sampler(request, place, config, platform),
        stage=Stage(links=place.links, is_last=place.stage.is_last),
    )


def _swapper(
    request: BuildRequest,
    place: RankPlace,
    config: EngineConfig,
    kv_caches: Sequence[torch.Tensor],
) -> MemorySwapper | None:
    """All ranks have all planes of what drafts; the first rank saves them."""
    if not config.num_swap_slots:
        return None
    slots = map_slots(place.slots, config, block_bytes_of(request))
    part = block_part(request, place)
    whole = place.shard.index == 0
    meet = partial(place.group.join, torch.zeros(1, 1))
    return MemorySwapper.of_part(kv_caches, slots, part, saves_whole_planes=whole, meet=meet)


def _sampler(
    request: BuildRequest, place: RankPlace, config: EngineConfig, platform: Platform
) -> Sampler | None:
    """None: all logits are whole rows. Those of what drafts are a rank's part on any platform."""
    sampling = platform.sampling
    if place.shard.size == 1:
        return None
    parts = sampling if isinstance(sampling, PartSampling) else None
    sharded = ShardedSampling(sampling, parts, place.shard, request.model.vocab_size, place.group)
    return Sampler(config.num_rows, sharded, platform.device, sharded.whole)


def rank_model(
    request: BuildRequest,
    place: RankPlace,
    max_model_len: int,
    platform: Platform,
    weights: Weights,
    *,
    sums_products: bool = True,
    ends: StageEnds | None = None,
) -> Model:
    """The model over this rank's weights. `sums_products`: see `over_group`. `ends`: of its stage;
    None: the links'."""
    local = place.local_config(request.model)
    layout = local_names(model_class(request.model).layout(request.model), place.stage)
    joins = not isinstance(platform.sampling, PartSampling)
    if request.is_tree:
        weights = of_leaves(weights, layout, platform, place.group)
        sums_products = False
    how = {"joins_vocabulary": joins, "sums_products": sums_products}
    whole = over_group(weights, layout, platform, place.shard, place.group, **how)
    model = model_class(request.model)(local, whole, platform, max_model_len)
    ends = place.links if ends is None else ends
    if not place.stage.is_first:
        model.embedding = ends.beginning(local.hidden_size, model.dtype)
    elif place.shard.size > 1:
        token_ids = place.shard.vocabulary(request.model.vocab_size)
        model.embedding = ShardedEmbedding(model.embedding, token_ids, place.group)
    if not place.stage.is_last:
        model.final_norm = ends.end()
    return model
