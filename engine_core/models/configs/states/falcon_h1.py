"""Configs of Falcon-H1, whose layers have Mamba-2 and attention side by side. A published layer is
two layers here: Mamba-2, and attention with the MLP."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from ....config import ConfigError, require
from ....weights.model_config import ModelConfig, size_of
from ....weights.rope.config import positive_of
from ....weights.state_layers import MambaConfig, Multipliers, check_steps
from ..fields import Config, count_of

SERVED = {
    "attention_bias": False,
    "mlp_bias": False,
    "projectors_bias": False,
    "mamba_proj_bias": False,
    "mamba_conv_bias": True,
}
"""Fields with a single supported value, which is also their default."""
NORM_EPS = 1e-5


def read_falcon_h1(config: Config) -> ModelConfig:
    check_steps(config)
    for name, served in SERVED.items():
        given = config.get(name, served)
        require(given is served, name, given, str(served).lower())
    num_layers = size_of(config, "num_hidden_layers")
    mamba = _mamba(config)
    into = positive_of(config, "attention_in_multiplier", 1.0)
    keys = positive_of(config, "key_multiplier", 1.0)
    model = ModelConfig.from_hf(
        {**config, "num_hidden_layers": 2 * num_layers},
        rms_norm_eps=positive_of(config, "rms_norm_eps", NORM_EPS),
        embedding_scale=positive_of(config, "embedding_multiplier", 1.0),
        logit_scale=positive_of(config, "lm_head_multiplier", 1.0),
        mamba=mamba,
        states=mamba.states((True, False) * num_layers),
        has_inner=(False, True) * num_layers,
        multipliers=Multipliers(
            projections=_multipliers(config, "ssm_multipliers", 5),
            mamba_in=positive_of(config, "ssm_in_multiplier", 1.0),
            mamba_out=positive_of(config, "ssm_out_multiplier", 1.0),
            # The factor of what attention reads multiplies its values.
            attention_out=into * positive_of(config, "attention_out_multiplier", 1.0),
            mlp=_multipliers(config, "mlp_multipliers", 2),
        ),
    )
    # The factor of attention's input multiplies queries and keys, too.
    return replace(model, attention_scale=into * into * keys / math.sqrt(model.head_dim))


def _mamba(config: Config) -> MambaConfig:
    """Raises `ConfigError` for what is not served."""
    heads = count_of(config, "mamba_n_heads", 128)
    groups = config.get("mamba_n_groups", 1)
    has_norm = bool(config.get("mamba_rms_norm", False))
    name = "mamba_norm_before_gate"
    before_gate = config.get(name, True)
    require(not (has_norm and before_gate), name, before_gate, "false with mamba_rms_norm")
    inner = config.get("mamba_d_ssm")
    if inner is None:
        inner = count_of(config, "mamba_expand", 2) * size_of(config, "hidden_size")
    else:
        inner = count_of(config, "mamba_d_ssm")
    is_auto = config.get("mamba_d_head", "auto") == "auto"
    size = inner // heads if is_auto else count_of(config, "mamba_d_head")
    allowed = f"mamba_n_heads · mamba_d_head, {heads * size}"
    require(inner == heads * size, "mamba_d_ssm", inner, allowed)
    return MambaConfig(
        num_heads=heads,
        head_dim=size,
        state_dim=config.get("mamba_d_state", 256),
        width=config.get("mamba_d_conv", 4),
        num_groups=groups,
        num_norm_groups=groups if has_norm else 0,
    )


def _multipliers(config: Config, name: str, count: int) -> tuple[float, ...]:
    """Raises `ConfigError`."""
    given = config.get(name)
    if given is None:
        return (1.0,) * count
    is_list = isinstance(given, Sequence) and len(given) == count
    if not is_list or not all(type(each) in (int, float) for each in given):
        raise ConfigError(name, given, f"{count} numbers")
    return tuple(float(each) for each in given)
