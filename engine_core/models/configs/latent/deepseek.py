"""Configs of DeepSeek V2, V3 and V3.2, Kimi K2, GLM-4.7-Flash and GLM-5, whose routers multiply in
float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ....config import require
from ....weights.experts_config import ExpertsConfig
from ....weights.latent_config import IndexConfig
from ....weights.model_config import ModelConfig
from ....weights.rope.config import positive_of
from ..fields import Config, count_of, layers_with_experts, with_experts
from .fields import read_index, read_latent

GREEDY = "greedy"
IN_GROUPS = "group_limited_greedy"
FULL = "full"
SHARED = "shared"
"""Values of `indexer_types`."""


def read_deepseek_v2(config: Config) -> ModelConfig:
    """Config of DeepSeek V2, whose experts' weights are not divided by their sum."""
    method = config.get("topk_method", GREEDY)
    require(method in (GREEDY, IN_GROUPS), "topk_method", method, f"{GREEDY} or {IN_GROUPS}")
    _check(config, {"scoring_func": "softmax", "norm_topk_prob": False})
    groups = {}
    if method == IN_GROUPS:
        groups = {**_groups(config), "num_group_scores": 1}
    read = read_latent(config, is_interleaved=True)
    return _with_experts(read, config, _behind(config, 0), **groups)


def read_deepseek_v3(config: Config) -> ModelConfig:
    _check(config, {"scoring_func": "sigmoid", "topk_method": "noaux_tc"})
    return _read_corrected(config, _behind(config, 3))


def read_deepseek_v32(config: Config) -> ModelConfig:
    """Config of DeepSeek V3.2: V3 with sparse indexers, whose halves rotate with each other."""
    _check(config, {"scoring_func": "sigmoid", "topk_method": "noaux_tc"})
    index = read_index(config, is_interleaved=False)
    return _read_corrected(config, _behind(config, 3), index)


def read_glm_moe_dsa(config: Config) -> ModelConfig:
    """Config of GLM-5, whose layers may attend to what the indexer of an earlier one chooses."""
    _check(config, {"scoring_func": "sigmoid"})
    is_interleaved = bool(config.get("indexer_rope_interleave", True))
    shared = _shared_choices(config)
    index = read_index(config, is_interleaved=is_interleaved, is_shared=shared)
    return _read_corrected(config, _behind(config, 3), index)


def _shared_choices(config: Config) -> tuple[bool, ...]:
    """Whether each layer shares the choice of an earlier one: by `indexer_types`, else by the
    letters of `index_topk_pattern`, else every layer but each `index_topk_freq`-th. Raises
    `ConfigError`."""
    num_layers = count_of(config, "num_hidden_layers")
    name = "indexer_types" if config.get("indexer_types") else "index_topk_pattern"
    kinds = config.get(name)
    if kinds is None:
        step = count_of(config, "index_topk_freq", 1)
        offset = count_of(config, "index_skip_topk_offset", 2, least=0)
        return tuple(max(i - offset + 1, 0) % step > 0 for i in range(num_layers))
    words = {FULL: FULL, SHARED: SHARED, "F": FULL, "S": SHARED}
    is_list = isinstance(kinds, str | list) and len(kinds) == num_layers
    served = is_list and set(kinds) <= words.keys() and words[kinds[0]] == FULL
    require(served, name, kinds, f"{FULL} or {SHARED} for each layer, {FULL} for the first")
    return tuple(words[kind] == SHARED for kind in kinds)


def read_glm4_moe_lite(config: Config) -> ModelConfig:
    return _read_corrected(config, _behind(config, 1))


def _read_corrected(
    config: Config, has_experts: Callable[[int], bool], index: IndexConfig | None = None
) -> ModelConfig:
    """Config of a model whose experts are chosen by sigmoids with a correction."""
    is_interleaved = bool(config.get("rope_interleave", True))
    read = read_latent(config, index=index, is_interleaved=is_interleaved)
    return _with_experts(
        read,
        config,
        has_experts,
        is_sigmoid=True,
        has_correction=True,
        is_normalized=bool(config.get("norm_topk_prob", True)),
        **_groups(config),
    )


def _with_experts(
    read: ModelConfig, config: Config, has_experts: Callable[[int], bool], **routing: Any
) -> ModelConfig:
    inner = count_of(config, "moe_intermediate_size")
    experts = ExpertsConfig(
        num_experts=count_of(config, "n_routed_experts"),
        num_chosen=count_of(config, "num_experts_per_tok"),
        intermediate_size=inner,
        scale=positive_of(config, "routed_scaling_factor", 1.0),
        shared_size=count_of(config, "n_shared_experts", 1, least=0) * inner,
        is_sparse=layers_with_experts(config, has_experts),
        has_wide_router=True,
        **routing,
    )
    return with_experts(read, experts)


def _groups(config: Config) -> dict[str, int]:
    return {
        "num_groups": count_of(config, "n_group", 1),
        "num_chosen_groups": count_of(config, "topk_group", 1),
    }


def _behind(config: Config, default: int) -> Callable[[int], bool]:
    """Whether a layer has experts: those after the first, dense ones, all or every n-th."""
    first = count_of(config, "first_k_dense_replace", default, least=0)
    step = count_of(config, "moe_layer_freq", 1)
    return lambda i: i >= first and i % step == 0


def _check(config: Config, served: dict[str, object]) -> None:
    """Raises `ConfigError` for fields with other values than those of published checkpoints."""
    for name, value in served.items():
        given = config.get(name, value)
        require(given == value, name, given, str(value).lower())
