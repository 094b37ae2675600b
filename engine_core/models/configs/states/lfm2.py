"""Configs of LFM2, dense and with experts: short convolutions and attention."""

from __future__ import annotations

from ....config import ConfigError, require
from ....weights.experts_config import ExpertsConfig
from ....weights.model_config import ModelConfig, size_of
from ....weights.rope.config import positive_of
from ....weights.state_layers import ShortConvConfig
from ..fields import FULL, Config, count_of, with_experts

CONV = "conv"
DEFAULT_THETA = 1_000_000.0
NORM_EPS = 1e-5


def read_lfm2(config: Config) -> ModelConfig:
    return _read({**config, "intermediate_size": _inner_size(config)})


def read_lfm2_moe(config: Config) -> ModelConfig:
    """Experts are chosen by sigmoids and a correction, in all layers but the first ones."""
    first = count_of(config, "num_dense_layers", 2, least=0)
    num_layers = size_of(config, "num_hidden_layers")
    experts = ExpertsConfig(
        num_experts=count_of(config, "num_experts"),
        num_chosen=count_of(config, "num_experts_per_tok"),
        intermediate_size=count_of(config, "moe_intermediate_size"),
        is_sigmoid=True,
        is_normalized=bool(config.get("norm_topk_prob", True)),
        scale=positive_of(config, "routed_scaling_factor", 1.0),
        has_correction=bool(config.get("use_expert_bias", True)),
        is_sparse=tuple(i >= first for i in range(num_layers)),
    )
    return with_experts(_read(config), experts)


def _read(config: Config) -> ModelConfig:
    bias = config.get("conv_bias", False)
    require(not bias, "conv_bias", bias, "false")
    hidden = size_of(config, "hidden_size")
    conv = ShortConvConfig(width=config.get("conv_L_cache", 3), hidden_size=hidden)
    tied = config.get("tie_embedding", config.get("tie_word_embeddings", True))
    return ModelConfig.from_hf(
        {**config, "tie_word_embeddings": tied},
        default_theta=DEFAULT_THETA,
        rms_norm_eps=positive_of(config, "norm_eps", NORM_EPS),
        activation="silu",
        qk_norm=True,
        conv=conv,
        states=conv.states(_conv_layers(config)),
    )


def _inner_size(config: Config) -> int:
    """Intermediate size of the MLPs: two thirds of the config's value times a factor, rounded up to
    a multiple, unless the config disables this. Raises `ConfigError`."""
    name = "block_ff_dim" if "block_ff_dim" in config else "intermediate_size"
    size = count_of(config, name)
    if not config.get("block_auto_adjust_ff_dim", True):
        return size
    factor = config.get("block_ffn_dim_multiplier", 1.0)
    size = int(2 * size / 3)
    if factor is None:
        return size
    multiple = count_of(config, "block_multiple_of", 256)
    grown = int(positive_of(config, "block_ffn_dim_multiplier", 1.0) * size)
    return -(-grown // multiple) * multiple


def _conv_layers(config: Config) -> tuple[bool, ...]:
    """Whether each layer is a convolution: what `layer_types` says, else all but those of
    `full_attn_idxs`. Raises `ConfigError`."""
    num_layers = size_of(config, "num_hidden_layers")
    types = config.get("layer_types")
    if types is None:
        full = config.get("full_attn_idxs", [])
        is_list = isinstance(full, list) and all(type(i) is int for i in full)
        require(is_list, "full_attn_idxs", full, "a list of numbers of layers")
        types = [FULL if i in full else CONV for i in range(num_layers)]
    is_known = isinstance(types, list) and {*types} == {CONV, FULL}
    if not is_known or len(types) != num_layers:
        allowed = f"{num_layers} of {CONV} and {FULL}, at least one of each"
        raise ConfigError("layer_types", types, allowed)
    return tuple(kind == CONV for kind in types)
