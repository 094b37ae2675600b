"""Weights of a layer's mixture of experts: their layout, and their names in checkpoints.

Checkpoints name the same things in their families' words; no name means two things, so all
families share one table.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from ...weights.experts_config import ExpertsConfig
from ...weights.layout import (
    Split,
    WeightSpec,
    bias,
    expert_biases,
    experts,
    joined_expert_biases,
    joined_experts,
    joined_linear,
    linear,
    norm,
    table,
    whole_experts,
)
from ...weights.model_config import ModelConfig

GATE_UP = "experts_gate_up"
DOWN = "experts_down"
GATE_UP_BIAS = "experts_gate_up_bias"
DOWN_BIAS = "experts_down_bias"
ROUTER = "router"
ROUTER_BIAS = "router_bias"
CORRECTION = "router_correction"
SHARED_GATE_UP = "shared_gate_up"
UP = "experts_up"
SHARED_UP = "shared_up"
SHARED_DOWN = "shared_down"
SHARED_GATE = "shared_gate"
ROUTER_NORM = "router_norm"
EXPERT_SCALES = "expert_scales"
DENSE_NORM = "dense_norm"
EXPERTS_INPUT_NORM = "experts_input_norm"
EXPERTS_NORM = "experts_norm"

_PLACES = ("mlp", "block_sparse_moe")
_SHARED = ("mlp.shared_expert", "mlp.shared_experts", "mlp.shared_mlp")
MIXTURE_NAMES = {
    **{f"{place}.gate.weight": ROUTER for place in _PLACES},
    "mlp.router.gate.weight": ROUTER,
    "block_sparse_moe.router.layer.weight": ROUTER,
    "mlp.router.weight": ROUTER,
    "mlp.router.bias": ROUTER_BIAS,
    "mlp.gate.e_score_correction_bias": CORRECTION,
    "mlp.moe_statics.e_score_correction_bias": CORRECTION,
    "block_sparse_moe.e_score_correction_bias": CORRECTION,
    "mlp.expert_bias": CORRECTION,
    **{f"{place}.experts.gate_up_proj": GATE_UP for place in _PLACES},
    **{f"{place}.experts.down_proj": DOWN for place in _PLACES},
    "mlp.experts.gate_up_proj_bias": GATE_UP_BIAS,
    "mlp.experts.down_proj_bias": DOWN_BIAS,
    "block_sparse_moe.input_linear.weight": GATE_UP,
    "block_sparse_moe.output_linear.weight": DOWN,
    **{f"{shared}.down_proj.weight": SHARED_DOWN for shared in _SHARED},
    "mlp.shared_expert_gate.weight": SHARED_GATE,
}
"""Like `CheckpointNames.layer`."""
SHARED_NAMES = {
    f"{shared}.{part}_proj.weight": (SHARED_GATE_UP, place)
    for shared in _SHARED
    for place, part in enumerate(("gate", "up"))
}
"""Like `CheckpointNames.fused`."""
EXPERT_NAMES = {
    "gate_proj.weight": (GATE_UP, 0),
    "up_proj.weight": (GATE_UP, 1),
    "down_proj.weight": (DOWN, 0),
    "w1.weight": (GATE_UP, 0),
    "w3.weight": (GATE_UP, 1),
    "w2.weight": (DOWN, 0),
}
"""Like `CheckpointNames.experts`."""


def outputs_first(weight: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    """[experts, inputs, outputs] → [experts * outputs, inputs]; see `CheckpointNames.changed`."""
    return weight.transpose(1, 2).flatten(0, 1)


def mixture_of(config: ExpertsConfig, hidden_size: int) -> dict[str, WeightSpec]:
    """Weights of one layer's experts and of their router."""
    inner = config.intermediate_size
    weights = {
        ROUTER: _router(config, hidden_size),
        GATE_UP: joined_experts(config.num_experts, (inner, inner), hidden_size),
        DOWN: experts(config.num_experts, hidden_size, inner),
    }
    if config.has_biases:
        weights[ROUTER_BIAS] = replace(bias(config.num_experts), is_routing=True)
        weights[GATE_UP_BIAS] = joined_expert_biases(config.num_experts, (inner, inner))
        weights[DOWN_BIAS] = expert_biases(config.num_experts, hidden_size)
    if config.are_beside_mlp:
        names = (ROUTER_NORM, DENSE_NORM, EXPERTS_INPUT_NORM, EXPERTS_NORM)
        weights |= dict.fromkeys(names, norm(hidden_size))
        weights[EXPERT_SCALES] = replace(table(config.num_experts), is_routing=True)
    if config.are_whole:
        of_experts = {GATE_UP, DOWN, GATE_UP_BIAS, DOWN_BIAS} & weights.keys()
        weights |= {name: whole_experts(weights[name]) for name in of_experts}
    if config.has_correction:
        correction = table(config.num_experts)
        weights[CORRECTION] = replace(correction, is_routing=True, is_wide=True)
    if shared := config.shared_size:
        weights[SHARED_GATE_UP] = joined_linear((shared, shared), hidden_size)
        weights[SHARED_DOWN] = linear(hidden_size, shared, split=Split.INPUTS)
    if config.has_shared_gate:
        weights[SHARED_GATE] = replace(linear(1, hidden_size), is_routing=True)
    return weights


def plain_mixture_of(config: ExpertsConfig, hidden_size: int) -> dict[str, WeightSpec]:
    """Like `mixture_of`, for experts without gates, biases and norms."""
    weights = mixture_of(config, hidden_size)
    del weights[GATE_UP]
    ups = joined_experts(config.num_experts, (config.intermediate_size,), hidden_size)
    weights[UP] = whole_experts(ups) if config.are_whole else ups
    if weights.pop(SHARED_GATE_UP, None) is not None:
        weights[SHARED_UP] = joined_linear((config.shared_size,), hidden_size)
    return weights


def _router(config: ExpertsConfig, hidden_size: int) -> WeightSpec:
    """Weight of the router. A router in float32 is no linear layer: those have the model's
    dtype."""
    shape = config.num_experts, hidden_size
    if config.has_wide_router:
        return replace(table(*shape), is_routing=True, is_wide=True)
    return replace(linear(*shape), is_routing=True)
