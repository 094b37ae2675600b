"""How the ranks of an engine divide a model's experts: a share of each, or whole ones."""

from __future__ import annotations

from dataclasses import replace

from ...config import ConfigError, require
from ...options import TREE, ExecutorOptions
from ...platforms.capabilities import Capabilities
from ...weights.model_config import ModelConfig
from ...weights.shards import NUM_LEAVES

BY_RANK = "--expert-parallel, by which each rank has whole experts"


def with_expert_layout(
    options: ExecutorOptions, model: ModelConfig, flags: Capabilities, where: str
) -> ModelConfig:
    """Config of the model; its experts are whole on each rank if the options ask for it. Raises
    `ConfigError`."""
    experts = model.experts
    asked = options.expert_parallel
    require(not asked or flags.expert_parallel, "expert_parallel", asked, f"false {where}")
    if experts is None:
        require(not asked, "expert_parallel", asked, "false for a model without experts")
        return model
    size = options.tensor_parallel_size
    is_tree = options.numerics == TREE
    if not asked and size > 1:
        require(not is_tree, "numerics", TREE, f"default for experts of {size} ranks, or {BY_RANK}")
        _check_scales(model, size)
    if not asked and not is_tree:
        return model
    if is_tree:
        require(flags.expert_parallel, "numerics", TREE, f"default for experts {where}")
        count = experts.num_experts
        allowed = f"default for {count} experts, which {NUM_LEAVES} does not divide"
        require(count % NUM_LEAVES == 0, "numerics", TREE, allowed)
    return replace(model, experts=replace(experts, are_whole=True))


def _check_scales(model: ModelConfig, num_ranks: int) -> None:
    """Raises `ConfigError` where a rank's share of an expert would cut numbers that have one
    scale."""
    if model.quantization is None:
        return
    packing = model.quantization.rules[-1].packing
    sizes = {packing.inputs_by_scale, 1 if packing.block is None else packing.block[0]}
    assert model.experts is not None
    width = model.experts.intermediate_size
    for size in sizes - {-1}:
        if width % size == 0 and width // num_ranks % size:
            allowed = (
                f"sizes that cut an expert's {width} at multiples of {size}, which have one scale, "
                f"or {BY_RANK}"
            )
            raise ConfigError("tensor_parallel_size", num_ranks, allowed)
