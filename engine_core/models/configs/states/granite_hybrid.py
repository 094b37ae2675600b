"""Configs of Granite 4 with layers of Mamba-2, with experts or without."""

from __future__ import annotations

from dataclasses import replace

from ....config import ConfigError, require
from ....weights.experts_config import ExpertsConfig
from ....weights.model_config import ModelConfig, size_of
from ....weights.state_layers import MambaConfig, check_steps
from ..fields import FULL, Config, count_of, with_experts
from ..granite import read_granite

MAMBA = ("mamba", "linear_attention")
ATTENTION = ("attention", FULL)
"""Names of kinds of layers: those of published files, and transformers'."""
WIDTH = 4


def read_granite_hybrid(config: Config) -> ModelConfig:
    mamba = _mamba(config)
    shared = count_of(config, "shared_intermediate_size", 1024)
    has_experts = count_of(config, "num_local_experts", 8, least=0) > 0
    sizes = {} if has_experts else {"intermediate_size": shared}
    kind = config.get("position_embedding_type")
    allowed = "rope or nope"
    require(kind in (None, "rope", "nope"), "position_embedding_type", kind, allowed)
    model = replace(
        read_granite({**config, **sizes}),
        mamba=mamba,
        states=mamba.states(_mamba_layers(config)),
        is_rotary=() if kind == "rope" else (False,) * size_of(config, "num_hidden_layers"),
    )
    if not has_experts:
        return model
    experts = ExpertsConfig(
        num_experts=count_of(config, "num_local_experts", 8),
        num_chosen=count_of(config, "num_experts_per_tok", 2),
        intermediate_size=count_of(config, "intermediate_size"),
        is_normalized=True,
        shared_size=shared,
    )
    return with_experts(model, experts)


def _mamba(config: Config) -> MambaConfig:
    """Raises `ConfigError` for what is not served."""
    check_steps(config)
    for name, served in (("mamba_conv_bias", True), ("mamba_proj_bias", False)):
        given = config.get(name, served)
        require(given is served, name, given, str(served).lower())
    heads = count_of(config, "mamba_n_heads", 128)
    size = config.get("mamba_d_head", "auto")
    if size == "auto":
        size = count_of(config, "mamba_expand", 2) * size_of(config, "hidden_size") // heads
    return MambaConfig(
        num_heads=heads,
        head_dim=size,
        state_dim=config.get("mamba_d_state", 256),
        width=config.get("mamba_d_conv", WIDTH),
        num_groups=config.get("mamba_n_groups", 1),
    )


def _mamba_layers(config: Config) -> tuple[bool, ...]:
    """Whether each layer is one of Mamba-2. Raises `ConfigError`."""
    num_layers = size_of(config, "num_hidden_layers")
    types = config.get("layer_types", config.get("layers_block_type"))
    is_known = isinstance(types, list) and all(kind in (*MAMBA, *ATTENTION) for kind in types)
    if not is_known or len(types) != num_layers:
        allowed = f"{num_layers} of {MAMBA[0]} and {ATTENTION[0]}"
        raise ConfigError("layer_types", types, allowed)
    return tuple(kind in MAMBA for kind in types)
