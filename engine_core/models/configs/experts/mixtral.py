"""Configs of Mixtral, of OLMoE and of Granite MoE, whose experts are all that their layers have
beside attention."""

from __future__ import annotations

from ....config import require
from ....weights.experts_config import ExpertsConfig
from ....weights.model_config import ModelConfig
from ..fields import Config, count_of, kinds_of_layers, windows, with_experts
from ..granite import read_granite

THETA = 1_000_000.0


def read_mixtral(config: Config) -> ModelConfig:
    kinds = kinds_of_layers(config, lambda i: True)
    read = ModelConfig.from_hf(config, default_theta=THETA, **windows(config, kinds))
    return with_experts(read, _experts(config, "num_local_experts", is_normalized=True))


def read_olmoe(config: Config) -> ModelConfig:
    clip = config.get("clip_qkv")
    require(clip is None, "clip_qkv", clip, "none")
    bias = bool(config.get("attention_bias", False))
    read = ModelConfig.from_hf(config, width_norms=True, qkv_bias=bias, o_bias=bias)
    is_normalized = bool(config.get("norm_topk_prob", False))
    return with_experts(read, _experts(config, "num_experts", is_normalized=is_normalized))


def read_granite_moe(config: Config) -> ModelConfig:
    """Config of Granite 3 with experts: a softmax over the chosen experts equals the softmax over
    all, normalized over the chosen."""
    read = read_granite(config)
    return with_experts(read, _experts(config, "num_local_experts", is_normalized=True))


def _experts(config: Config, num_experts: str, *, is_normalized: bool) -> ExpertsConfig:
    """`num_experts` is the name of that field."""
    return ExpertsConfig(
        num_experts=count_of(config, num_experts),
        num_chosen=count_of(config, "num_experts_per_tok"),
        intermediate_size=count_of(config, "intermediate_size"),
        is_normalized=is_normalized,
    )
