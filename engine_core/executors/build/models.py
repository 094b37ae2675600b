"""Models over loaded weights: a whole one, and one rank's part of it."""

from __future__ import annotations

from ...config import EngineConfig
from ...layers.leaves import of_leaves
from ...layers.linear.kinds import Weights
from ...layers.platform import Platform
from ...layers.process_group import Alone
from ...layers.sharded import ShardedEmbedding, over_group
from ...layers.staged import local_names
from ...models.model import Model, model_class
from ...options import BuildRequest
from ...sampling.operations import PartSampling
from ..ranks.rank import Rank
from ..ranks.stage_link import StageEnds

Loaded = tuple[Platform, Weights]
"""A model's operations and its weights."""


def whole_model(request: BuildRequest, config: EngineConfig, loaded: Loaded) -> Model:
    """The request's model over all of its weights."""
    platform, weights = loaded
    found = model_class(request.model)
    if request.is_tree:
        weights = of_leaves(weights, found.layout(request.model), platform, Alone())
    return found(request.model, weights, platform, config.max_model_len)


def rank_model(
    request: BuildRequest,
    rank: Rank,
    max_model_len: int,
    platform: Platform,
    weights: Weights,
    *,
    sums_products: bool = True,
    ends: StageEnds | None = None,
) -> Model:
    """The model over this rank's weights. `sums_products`: see `over_group`. `ends`: first and last
    layers of its stage; None: those of the rank's links."""
    local = rank.local_config(request.model)
    layout = local_names(model_class(request.model).layout(request.model), rank.stage)
    joins = not isinstance(platform.sampling, PartSampling)
    if request.is_tree:
        weights = of_leaves(weights, layout, platform, rank.group)
        sums_products = False
    how = {"joins_vocabulary": joins, "sums_products": sums_products}
    whole = over_group(weights, layout, platform, rank.shard, rank.group, **how)
    model = model_class(request.model)(local, whole, platform, max_model_len)
    ends = rank.links if ends is None else ends
    if not rank.stage.is_first:
        model.embedding = ends.beginning(local.hidden_size, model.dtype)
    elif rank.shard.size > 1:
        token_ids = rank.shard.vocabulary(request.model.vocab_size)
        model.embedding = ShardedEmbedding(model.embedding, token_ids, rank.group)
    if not rank.stage.is_last:
        model.final_norm = ends.end()
    return model
