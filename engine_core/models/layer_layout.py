"""Weights of a decoder: those that all models have, and those of each layer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ..weights.layout import (
    Layout,
    Split,
    WeightSpec,
    bias,
    joined_bias,
    joined_linear,
    linear,
    norm,
    table,
    width_norm,
)
from ..weights.model_config import ModelConfig
from .experts.mixture import mixture_of, plain_mixture_of
from .latent.latent_parts import latent_weights_of
from .states.state_parts import state_weights_of


def _attention_of(config: ModelConfig) -> dict[str, WeightSpec]:
    hidden = config.hidden_size
    products = {
        "qkv": joined_linear(config.qkv_sizes, hidden, config.qkv_heads),
        "o": linear(hidden, config.num_heads * config.projected_dims[1], split=Split.INPUTS),
    }
    if config.qkv_bias:
        products["qkv_bias"] = joined_bias(config.qkv_sizes, config.qkv_heads)
    if config.o_bias:
        products["o_bias"] = bias(hidden)
    if config.has_sinks:
        products["sinks"] = joined_bias((config.num_heads,))
    return products | _head_norms_of(config)


def _head_norms_of(config: ModelConfig) -> dict[str, WeightSpec]:
    """Norms of queries, and of keys where the layer makes any."""
    names = ("q_norm", "k_norm") if config.num_kv_projections else ("q_norm",)
    if config.width_norms:
        return {name: width_norm(n) for name, n in zip(names, config.qkv_sizes, strict=False)}
    return dict.fromkeys(names, norm(config.head_dim)) if config.qk_norm else {}


def _mlp_of(config: ModelConfig) -> dict[str, WeightSpec]:
    hidden = config.hidden_size
    inner = config.intermediate_size
    ups = ("gate_up", (inner, inner)) if config.is_gated else ("up", (inner,))
    products = {
        ups[0]: joined_linear(ups[1], hidden),
        "down": linear(hidden, inner, split=Split.INPUTS),
    }
    if config.mlp_bias:
        products |= {ups[0] + "_bias": joined_bias(ups[1]), "down_bias": bias(hidden)}
    return products


def norms_of(config: ModelConfig, names: Iterable[str]) -> dict[str, WeightSpec]:
    """Norms of the hidden size, with their biases."""
    norms: dict[str, WeightSpec] = {}
    for name in names:
        norms[name] = norm(config.hidden_size)
        if config.norm_bias:
            norms[name + "_bias"] = bias(config.hidden_size)
    return norms


def layout_of(config: ModelConfig, layer_norms: Iterable[str]) -> Layout:
    """The layout of a model whose layers have these norms beside their products."""
    norms = norms_of(config, layer_norms)
    tied_to = "embed" if config.tie_word_embeddings else ""
    layout = {"embed": table(config.vocab_size, config.hidden_size, split=Split.VOCABULARY)}
    if config.num_learned_positions:
        layout["positions"] = table(config.num_learned_positions, config.hidden_size)
    layout |= norms_of(config, ("final_norm",))
    layout["lm_head"] = linear(
        config.vocab_size, config.hidden_size, tied_to=tied_to, split=Split.VOCABULARY
    )
    if config.labels:
        head = table(len(config.labels), config.hidden_size)
        layout["score"] = replace(head, is_wide=True, follows_layers=True)
    for i in range(config.num_layers):
        own = norms | _mixer_of(config, i) | _inner_of(config, i)
        layout |= {f"layers.{i}.{name}": spec for name, spec in own.items()}
    return layout


def _mixer_of(config: ModelConfig, i: int) -> dict[str, WeightSpec]:
    """Weights of the mixer of layer i: attention, a state, or both."""
    if config.latent is not None:
        return latent_weights_of(config, i)
    return state_weights_of(config) if config.has_state(i) else _attention_of(config.at(i))


def _inner_of(config: ModelConfig, i: int) -> dict[str, WeightSpec]:
    """Weights of the MLP of layer i, of its experts, or of both; empty: it has neither."""
    if not config.follows_mixer(i):
        return {}
    if config.experts is None or not config.has_experts(i):
        return _mlp_of(config.at(i))
    made = mixture_of if config.is_gated else plain_mixture_of
    mixture = made(config.experts, config.hidden_size)
    return _mlp_of(config.at(i)) | mixture if config.experts.are_beside_mlp else mixture
