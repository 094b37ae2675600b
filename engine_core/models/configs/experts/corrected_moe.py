"""Configs of GLM-4.5, MiniMax M2, Hy3 and ERNIE 4.5 with experts, which are chosen by corrected
scores. Their routers multiply in float32."""

from __future__ import annotations

from typing import Any

from ....config import require
from ....weights.experts_config import ExpertsConfig
from ....weights.model_config import ModelConfig, size_of
from ....weights.rope.config import positive_of
from ..fields import Config, count_of, layers_with_experts, with_experts
from ..llama import read_ernie45


def read_glm4_moe(config: Config) -> ModelConfig:
    read = ModelConfig.from_hf(
        {"partial_rotary_factor": 0.5, **config},
        rotates_parts=True,
        qkv_bias=bool(config.get("attention_bias", False)),
        qk_norm=bool(config.get("use_qk_norm", False)),
    )
    first = count_of(config, "first_k_dense_replace", 1, least=0)
    inner = count_of(config, "moe_intermediate_size")
    experts = _experts(
        num_experts=count_of(config, "n_routed_experts"),
        num_chosen=count_of(config, "num_experts_per_tok"),
        intermediate_size=inner,
        is_sigmoid=True,
        is_normalized=bool(config.get("norm_topk_prob", True)),
        scale=positive_of(config, "routed_scaling_factor", 1.0),
        num_groups=count_of(config, "n_group", 1),
        num_chosen_groups=count_of(config, "topk_group", 1),
        shared_size=count_of(config, "n_shared_experts", 1, least=0) * inner,
        is_sparse=layers_with_experts(config, lambda i: i >= first),
    )
    return with_experts(read, experts)


def read_minimax_m2(config: Config) -> ModelConfig:
    """Norms are over all heads."""
    for name, served in _MINIMAX.items():
        given = config.get(name, served)
        require(given == served, name, given, str(served))
    rotated = dict(config)
    if config.get("rotary_dim") is not None:
        share = count_of(config, "rotary_dim") / size_of(config, "head_dim")
        rotated.setdefault("partial_rotary_factor", share)
    read = ModelConfig.from_hf(
        rotated, default_theta=5_000_000.0, rotates_parts=True, width_norms=True
    )
    experts = _experts(
        num_experts=count_of(config, "num_local_experts"),
        num_chosen=count_of(config, "num_experts_per_tok"),
        intermediate_size=count_of(config, "intermediate_size"),
        is_sigmoid=True,
        is_normalized=True,
    )
    return with_experts(read, experts)


_MINIMAX: dict[str, Any] = {
    "scoring_func": "sigmoid",
    "use_routing_bias": True,
    "use_qk_norm": True,
    "qk_norm_type": "per_layer",
    "shared_intermediate_size": 0,
}
"""Fields with a single supported value, which all published checkpoints have."""


def read_hy3(config: Config) -> ModelConfig:
    bias = bool(config.get("attention_bias", False))
    mlp_bias = config.get("mlp_bias", False)
    require(not mlp_bias, "mlp_bias", mlp_bias, "false")
    read = ModelConfig.from_hf(
        config, default_theta=11_158_840.0, qk_norm=True, qkv_bias=bias, o_bias=bias
    )
    inner = count_of(config, "moe_intermediate_size")
    first = count_of(config, "first_k_dense_replace", 1, least=0)
    experts = _experts(
        num_experts=count_of(config, "num_experts"),
        num_chosen=count_of(config, "num_experts_per_tok"),
        intermediate_size=inner,
        is_sigmoid=True,
        is_normalized=True,
        scale=positive_of(config, "router_scaling_factor", 2.826),
        shared_size=count_of(config, "num_shared_experts", 1, least=0) * inner,
        is_sparse=layers_with_experts(config, lambda i: i >= first),
    )
    return with_experts(read, experts)


def read_ernie45_moe(config: Config) -> ModelConfig:
    bias = config.get("use_bias", False)
    require(not bias, "use_bias", bias, "false")
    inner = count_of(config, "moe_intermediate_size")
    first = count_of(config, "moe_layer_start_index", 1, least=0)
    step = count_of(config, "moe_layer_interval", 1)
    last = config.get("moe_layer_end_index", -1)
    if last == -1:
        last = size_of(config, "num_hidden_layers") - 1
    require(type(last) is int and last >= 0, "moe_layer_end_index", last, "a layer, or -1")
    experts = _experts(
        num_experts=count_of(config, "moe_num_experts"),
        num_chosen=count_of(config, "moe_k"),
        intermediate_size=inner,
        is_normalized=True,
        shared_size=count_of(config, "moe_num_shared_experts", 0, least=0) * inner,
        is_sparse=layers_with_experts(config, lambda i: first <= i <= last and (i + 1) % step == 0),
    )
    return with_experts(read_ernie45(config), experts)


def _experts(**facts: Any) -> ExpertsConfig:
    return ExpertsConfig(has_correction=True, has_wide_router=True, **facts)
