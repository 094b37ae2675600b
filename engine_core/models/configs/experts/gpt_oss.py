"""Config of gpt-oss: experts with biases and a clamped gate, windows in every other layer, and a
sink for each head."""

from __future__ import annotations

from ....config import require
from ....weights.experts_config import ExpertsConfig
from ....weights.model_config import CLAMPED_SWIGLU, ModelConfig
from ..fields import Config, count_of, kinds_of_layers, windows, with_experts

THETA = 150_000.0
ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""Scaling of rotary positions where a config does not say."""
SERVED = {"hidden_act": "silu", "swiglu_alpha": 1.702, "swiglu_limit": 7.0}
"""Fields with a single supported value, which all published checkpoints have."""


def read_gpt_oss(config: Config) -> ModelConfig:
    for name, served in SERVED.items():
        given = config.get(name, served)
        require(given == served, name, given, str(served))
    scaled = config.get("rope_parameters") or config.get("rope_scaling")
    bias = bool(config.get("attention_bias", True))
    read = ModelConfig.from_hf(
        {"rms_norm_eps": 1e-5, **config} | ({} if scaled else {"rope_scaling": ROPE}),
        default_theta=THETA,
        activation=CLAMPED_SWIGLU,
        qkv_bias=bias,
        o_bias=bias,
        has_sinks=True,
        **windows(config, kinds_of_layers(config, lambda i: i % 2 == 0), default=128),
    )
    return with_experts(read, _experts(config))


def _experts(config: Config) -> ExpertsConfig:
    """Experts of gpt-oss: a softmax over the chosen experts equals the softmax over all, normalized
    over the chosen."""
    return ExpertsConfig(
        num_experts=count_of(config, "num_local_experts"),
        num_chosen=count_of(config, "num_experts_per_tok"),
        intermediate_size=count_of(config, "intermediate_size"),
        is_normalized=True,
        has_biases=True,
    )
