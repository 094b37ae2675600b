"""Configs of Qwen3-Next, Qwen3.5 and Qwen3.6: gated delta nets and gated attention."""

from __future__ import annotations

from typing import Any

from ....config import ConfigError, require
from ....weights.model_config import ModelConfig, size_of
from ....weights.state_layers import DeltaConfig
from ..experts.qwen_moe import experts_of
from ..fields import FULL, Config, count_of, every, with_experts

LINEAR = "linear_attention"
PARTIAL_ROTARY = 0.25
CONV_WIDTH = 4
"""`linear_conv_kernel_dim` of all published checkpoints."""


def read_qwen3_next(config: Config) -> ModelConfig:
    return _with_experts({"norm_topk_prob": True, **config}, is_by_head=True)


def read_qwen3_5(config: Config) -> ModelConfig:
    return _read(config, is_by_head=False)


def read_qwen3_5_moe(config: Config) -> ModelConfig:
    """Weights of the chosen experts are always divided by their sum; no layer has an MLP."""
    width = count_of(config, "moe_intermediate_size")
    fixed = {"norm_topk_prob": True, "intermediate_size": width}
    return _with_experts({**config, **fixed}, is_by_head=False)


def _with_experts(config: Config, *, is_by_head: bool) -> ModelConfig:
    shared = count_of(config, "shared_expert_intermediate_size")
    experts = experts_of(config, shared_size=shared, has_shared_gate=True)
    return with_experts(_read(config, is_by_head=is_by_head), experts)


def _read(config: Config, *, is_by_head: bool) -> ModelConfig:
    bias = config.get("attention_bias", False)
    require(not bias, "attention_bias", bias, "false")
    width = config.get("linear_conv_kernel_dim", CONV_WIDTH)
    require(width == CONV_WIDTH, "linear_conv_kernel_dim", width, str(CONV_WIDTH))
    sizes: dict[str, Any] = {
        field: config.get(name, default)
        for field, name, default in (
            ("num_key_heads", "linear_num_key_heads", 16),
            ("num_value_heads", "linear_num_value_heads", 32),
            ("key_dim", "linear_key_head_dim", 128),
            ("value_dim", "linear_value_head_dim", 128),
        )
    }
    delta = DeltaConfig(is_by_head=is_by_head, **sizes)
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    share = config.get("partial_rotary_factor", rope.get("partial_rotary_factor", PARTIAL_ROTARY))
    return ModelConfig.from_hf(
        {"head_dim": 256, **config, "partial_rotary_factor": share},
        rotates_parts=True,
        qk_norm=True,
        norm_offset=1.0,
        has_output_gate=True,
        delta=delta,
        states=delta.states(_delta_layers(config)),
    )


def _delta_layers(config: Config) -> tuple[bool, ...]:
    """Whether each layer is a gated delta net: what `layer_types` says, else all but every n-th of
    `full_attention_interval`. Raises `ConfigError`."""
    num_layers = size_of(config, "num_hidden_layers")
    types = config.get("layer_types")
    if types is None:
        is_delta = every(config, "full_attention_interval", 4)
        types = [LINEAR if is_delta(i) else FULL for i in range(num_layers)]
    is_known = isinstance(types, list) and all(kind in (LINEAR, FULL) for kind in types)
    has_both = is_known and {LINEAR, FULL} <= {*types}
    if not has_both or len(types) != num_layers:
        allowed = f"{num_layers} of {LINEAR} and {FULL}, at least one of each"
        raise ConfigError("layer_types", types, allowed)
    return tuple(kind == LINEAR for kind in types)
