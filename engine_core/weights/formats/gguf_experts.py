"""Fields of a Hugging Face config that the metadata of a GGUF file stands for, of gpt-oss and of
families whose experts are chosen by corrected scores. See `gguf_fields`."""

from __future__ import annotations

from ...config import require
from .gguf_fields import Config, GgufFields

SIGMOID = 2
"""llama.cpp's number of the sigmoid, of functions that make scores of a router's logits."""
ROUTER = "ffn_gate_inp.weight"
SHARED = "ffn_up_shexp.weight"


def ernie45_moe(file: GgufFields, config: Config) -> Config:
    return {
        "moe_num_experts": file.meta("expert_count"),
        "moe_k": file.meta("expert_used_count"),
        # The width that a file also states is another one.
        "moe_num_shared_experts": _num_shared(file, config),
        **_kinds(file, config),
    }


def glm4_moe(file: GgufFields, config: Config) -> Config:
    _check_scores(file)
    return {
        "n_routed_experts": file.meta("expert_count"),
        "n_shared_experts": _num_shared(file, config),
        "n_group": file.meta("expert_group_count", 1),
        "topk_group": file.meta("expert_group_used_count", 1),
        "routed_scaling_factor": file.meta("expert_weights_scale", 1.0),
        "use_qk_norm": file.shape_of("blk.0.attn_q_norm.weight") is not None,
        **_kinds(file, config),
    }


def gpt_oss(file: GgufFields, config: Config) -> Config:
    """Files do not state that yarn's bounds are no whole pairs."""
    scaling = config["rope_scaling"]
    return {
        "intermediate_size": file.meta("expert_feed_forward_length"),
        "sliding_window": file.meta("attention.sliding_window"),
        "rope_scaling": None if scaling is None else {**scaling, "truncate": False},
    }


def hy3(file: GgufFields, config: Config) -> Config:
    _check_scores(file)
    is_normalized = file.meta("expert_weights_norm", True)
    require(is_normalized, "expert_weights_norm", is_normalized, "true")
    return {
        "num_shared_experts": _num_shared(file, config),
        "router_scaling_factor": file.meta("expert_weights_scale", 1.0),
        **_kinds(file, config),
    }


def minimax_m2(file: GgufFields, config: Config) -> Config:
    _check_scores(file)
    return {"intermediate_size": file.meta("expert_feed_forward_length")}


def _check_scores(file: GgufFields) -> None:
    function = file.meta("expert_gating_func", SIGMOID)
    require(function == SIGMOID, "expert_gating_func", function, f"{SIGMOID}: sigmoid")


def _num_shared(file: GgufFields, config: Config) -> int:
    """Experts that every token has, by the width of all of them together."""
    inner = file.meta("expert_feed_forward_length")
    layers = range(config["num_hidden_layers"])
    shapes = (file.shape_of(f"blk.{i}.{SHARED}") for i in layers)
    width = next((shape[0] for shape in shapes if shape is not None), 0)
    is_whole = type(inner) is int and inner > 0 and width % inner == 0
    require(is_whole, "expert_feed_forward_length", inner, f"a divisor of {width}")
    return int(width // inner)


def _kinds(file: GgufFields, config: Config) -> Config:
    """Kinds of layers, with experts or without, by the routers in a file."""
    layers = range(config["num_hidden_layers"])
    has_router = [file.shape_of(f"blk.{i}.{ROUTER}") is not None for i in layers]
    return {"mlp_layer_types": ["sparse" if has else "dense" for has in has_router]}
