"""Configs of Nemotron-H and Nemotron 3, whose published layers are one mixer, MLP or mixture of
experts each. A layer here is a mixer with the MLP or experts that follow it, if any do."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from ....config import ConfigError, require
from ....weights.experts_config import ExpertsConfig
from ....weights.model_config import SQUARED_RELU, ModelConfig
from ....weights.rope.config import positive_of
from ....weights.state_layers import MambaConfig, check_steps
from ..fields import Config, count_of

MAMBA = "linear_attention"
ATTENTION = "full_attention"
MLP = "mlp"
MOE = "moe"
LETTERS = {"M": MAMBA, "*": ATTENTION, "-": MLP, "E": MOE}
"""Kinds of layers by their letters in `hybrid_override_pattern`."""
OLD_NAMES = {"mamba": MAMBA, "attention": ATTENTION}
WITHOUT = ("attention_bias", "mlp_bias", "use_bias", "mamba_proj_bias", "residual_in_fp32")
"""Fields that are served where they are false."""
NORM_EPS = 1e-5


def read_nemotron_h(config: Config) -> ModelConfig:
    _check(config)
    kinds = _kinds(config)
    mixers = [i for i, kind in enumerate(kinds) if kind in (MAMBA, ATTENTION)]
    inner = [kinds[i + 1] if i + 1 < len(kinds) else "" for i in mixers]
    mamba = _mamba(config)
    model = ModelConfig.from_hf(
        {"head_dim": 128, **config, "num_hidden_layers": len(mixers)},
        rms_norm_eps=positive_of(config, "layer_norm_epsilon", NORM_EPS),
        activation=SQUARED_RELU,
        is_gated=False,
        mamba=mamba,
        states=mamba.states(tuple(kinds[i] == MAMBA for i in mixers)),
        is_rotary=(False,) * len(mixers),
        has_inner=tuple(kind in (MLP, MOE) for kind in inner),
    )
    if MOE not in inner:
        return model
    is_sparse = tuple(kind == MOE for kind in inner)
    return replace(model, experts=_experts(config, is_sparse))


def _check(config: Config) -> None:
    """Raises `ConfigError` for what is not served."""
    check_steps(config)
    for name in WITHOUT:
        given = config.get(name, False)
        require(not given, name, given, "false")
    for name, served in (
        ("use_conv_bias", True),
        ("mlp_hidden_act", SQUARED_RELU),
        ("mamba_hidden_act", "silu"),
        ("sliding_window", None),
        ("moe_latent_size", None),
    ):
        given = config.get(name, served)
        require(given == served, name, given, str(served))


def _kinds(config: Config) -> list[str]:
    """Kinds of the published layers. Raises `ConfigError`."""
    name = "layers_block_type"
    given = config.get(name)
    if given is None:
        name = "hybrid_override_pattern"
        pattern = config.get(name)
        is_pattern = isinstance(pattern, str) and pattern and {*pattern} <= LETTERS.keys()
        require(is_pattern, name, pattern, f"letters of {' '.join(LETTERS)}")
        given = [LETTERS[letter] for letter in str(pattern)]
    kinds = [OLD_NAMES.get(kind, kind) for kind in given] if isinstance(given, list) else []
    if not kinds or not {*kinds} <= {*LETTERS.values()}:
        raise ConfigError(name, given, f"a list of {', '.join(LETTERS.values())}")
    is_inner = [kind in (MLP, MOE) for kind in kinds]
    follows = not is_inner[0] and not any(one and other for one, other in pairwise(is_inner))
    allowed = "lists in which an mlp or moe follows linear_attention or full_attention"
    require(follows, name, given, allowed)
    return kinds


def _mamba(config: Config) -> MambaConfig:
    groups = config.get("n_groups", 8)
    return MambaConfig(
        num_heads=config.get("mamba_num_heads", 128),
        head_dim=config.get("mamba_head_dim", 64),
        state_dim=config.get("ssm_state_size", 128),
        width=config.get("conv_kernel", 4),
        num_groups=groups,
        num_norm_groups=groups,
    )


def _experts(config: Config, is_sparse: tuple[bool, ...]) -> ExpertsConfig:
    width = count_of(config, "moe_intermediate_size", 7688)
    count = count_of(config, "n_shared_experts", 1)
    require(count == 1, "n_shared_experts", count, "1")
    return ExpertsConfig(
        num_experts=count_of(config, "n_routed_experts", 8),
        num_chosen=count_of(config, "num_experts_per_tok", 2),
        intermediate_size=width,
        is_sigmoid=True,
        is_normalized=bool(config.get("norm_topk_prob", True)),
        scale=positive_of(config, "routed_scaling_factor", 1.0),
        has_correction=True,
        has_wide_router=True,
        num_groups=count_of(config, "n_group", 1),
        num_chosen_groups=count_of(config, "topk_group", 1),
        shared_size=count_of(config, "moe_shared_expert_intermediate_size", 7688),
        is_sparse=is_sparse,
    )
