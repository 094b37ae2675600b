"""Configs of Qwen2-MoE and Qwen3-MoE, whose routers take the softmax of all experts."""

from __future__ import annotations

from typing import Any

from ....config import require
from ....weights.experts_config import ExpertsConfig
from ....weights.model_config import ModelConfig, size_of
from ..fields import Config, count_of, with_experts


def read_qwen3_moe(config: Config) -> ModelConfig:
    _check_windows(config)
    bias = bool(config.get("attention_bias", False))
    read = ModelConfig.from_hf(config, qk_norm=True, qkv_bias=bias, o_bias=bias)
    return with_experts(read, experts_of(config))


def read_qwen2_moe(config: Config) -> ModelConfig:
    _check_windows(config)
    read = ModelConfig.from_hf(config, qkv_bias=bool(config.get("qkv_bias", True)))
    shared = count_of(config, "shared_expert_intermediate_size")
    return with_experts(read, experts_of(config, shared_size=shared, has_shared_gate=True))


def experts_of(config: Config, **shared: Any) -> ExpertsConfig:
    """Experts by the names of these configs; `shared`: fields of the shared expert."""
    # Newer tools write another name.
    name = "num_experts" if "num_experts" in config else "num_local_experts"
    return ExpertsConfig(
        num_experts=count_of(config, name),
        num_chosen=count_of(config, "num_experts_per_tok"),
        intermediate_size=count_of(config, "moe_intermediate_size"),
        is_normalized=bool(config.get("norm_topk_prob", False)),
        is_sparse=_sparse_layers(config),
        **shared,
    )


def _sparse_layers(config: Config) -> tuple[bool, ...]:
    """Whether a layer has experts, by layer: every `decoder_sparse_step`-th has, except
    `mlp_only_layers`."""
    num_layers = size_of(config, "num_hidden_layers")
    step = count_of(config, "decoder_sparse_step", 1)
    dense = config.get("mlp_only_layers") or []
    is_list = isinstance(dense, list) and all(type(layer) is int for layer in dense)
    require(is_list, "mlp_only_layers", dense, "a list of layers")
    return tuple(i not in dense and (i + 1) % step == 0 for i in range(num_layers))


def _check_windows(config: Config) -> None:
    """Raises `ConfigError` for a window, which no published checkpoint has."""
    given = config.get("use_sliding_window", False)
    require(not given, "use_sliding_window", given, "false")
