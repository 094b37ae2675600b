"""Config of the text model of Llama 4: rotary positions in three of four layers, whose queries and
keys have norms without factors, queries that grow in the others, and one expert a token."""

from __future__ import annotations

from dataclasses import replace

from ....config import require
from ....weights.experts_config import ExpertsConfig
from ....weights.model_config import ModelConfig, size_of
from ..fields import Config, count_of, with_experts
from ..smollm3 import rotary_layers

THETA = 500_000.0
CHUNK = 8192


def read_llama4(config: Config) -> ModelConfig:
    bias = bool(config.get("attention_bias", False))
    is_rotary = rotary_layers(config)
    dense_size = count_of(config, "intermediate_size_mlp", 16384)
    grows = config.get("attn_temperature_tuning", True)
    read = ModelConfig.from_hf(
        {"rms_norm_eps": 1e-5, **config, "intermediate_size": dense_size},
        default_theta=THETA,
        is_interleaved=True,
        is_rotary=is_rotary,
        plain_qk_norm=bool(config.get("use_qk_norm", True)),
        unrotated_scale_beta=float(config.get("attn_scale", 0.1)) if grows else 0.0,
        unrotated_scale_length=count_of(config, "floor_scale", CHUNK),
        qkv_bias=bias,
        o_bias=bias,
    )
    return with_experts(_in_chunks(read, config), _experts(config))


def _in_chunks(model: ModelConfig, config: Config) -> ModelConfig:
    """Layers that rotate attend within chunks of positions."""
    if config.get("attention_chunk_size", CHUNK) is None:
        return model
    chunk = count_of(config, "attention_chunk_size", CHUNK)
    return replace(model, sliding_window=chunk, is_windowed=model.is_rotary, attends_in_chunks=True)


def _experts(config: Config) -> ExpertsConfig:
    num_chosen = count_of(config, "num_experts_per_tok", 1)
    require(num_chosen == 1, "num_experts_per_tok", num_chosen, "1: it scales what an expert reads")
    width = count_of(config, "intermediate_size")
    return ExpertsConfig(
        num_experts=count_of(config, "num_local_experts", 16),
        num_chosen=num_chosen,
        intermediate_size=width,
        is_sigmoid=True,
        scales_inputs=True,
        shared_size=width,
        is_sparse=_sparse_layers(config),
    )


def _sparse_layers(config: Config) -> tuple[bool, ...]:
    num_layers = size_of(config, "num_hidden_layers")
    layers = config.get("moe_layers")
    if layers is None:
        step = count_of(config, "interleave_moe_layer_step", 1)
        return tuple((i + 1) % step == 0 for i in range(num_layers))
    is_list = isinstance(layers, list) and all(type(layer) is int for layer in layers)
    require(is_list, "moe_layers", layers, "a list of layers")
    return tuple(i in layers for i in range(num_layers))
