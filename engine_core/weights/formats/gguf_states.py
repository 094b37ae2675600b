"""Fields of a Hugging Face config that the metadata of a GGUF file stands for, and names of
tensors, of families whose layers keep states. See `gguf_fields`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ...config import require
from .gguf_fields import FULL, Config, GgufFields, granite

LINEAR = "linear_attention"
NO_ROPE = "nope"
HEADS_OF_LAYERS = "attention.head_count_kv"
"""Key heads of each layer, 0 of a layer without attention, where a file has them by layer."""
LFM2_NAMES = {
    "attn_norm": "operator_norm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "attn_output": "self_attn.out_proj",
    "ffn_norm": "ffn_norm",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
    "ffn_gate_inp": "feed_forward.gate",
    "exp_probs_b.bias": "feed_forward.expert_bias",
    "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
}
LFM2_MODEL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "token_embd_norm.weight": "model.embedding_norm.weight",
    "output.weight": "lm_head.weight",
}


def mamba_names(place: str) -> dict[str, str]:
    """Names of the tensors of Mamba-2, with their prefix in a layer."""
    return {
        "ssm_in": f"{place}.in_proj",
        "ssm_conv1d": f"{place}.conv1d",
        "ssm_dt.bias": f"{place}.dt_bias",
        "ssm_a": f"{place}.A_log",
        "ssm_d": f"{place}.D",
        "ssm_norm": f"{place}.norm",
        "ssm_out": f"{place}.out_proj",
    }


GRANITE_NAMES = mamba_names("mamba") | {
    "ffn_gate": "mlp.shared_expert.gate_proj",
    "ffn_up": "mlp.shared_expert.up_proj",
    "ffn_down": "mlp.shared_expert.down_proj",
}
"""Names beside those of most families. The MLP of a layer without experts is the shared expert."""
NEMOTRON_NAMES = mamba_names("mixer") | {
    "attn_norm": "norm",
    "attn_q": "mixer.q_proj",
    "attn_k": "mixer.k_proj",
    "attn_v": "mixer.v_proj",
    "attn_output": "mixer.o_proj",
    "ffn_up": "mixer.up_proj",
    "ffn_down": "mixer.down_proj",
    "ffn_gate_inp": "mixer.gate",
    "exp_probs_b.bias": "mixer.gate.e_score_correction_bias",
    "ffn_up_shexp": "mixer.shared_experts.up_proj",
    "ffn_down_shexp": "mixer.shared_experts.down_proj",
}
NEMOTRON_MODEL_NAMES = {
    "token_embd.weight": "model.embeddings.weight",
    "output_norm.weight": "model.norm_f.weight",
    "output.weight": "lm_head.weight",
}
FALCON_NAMES = mamba_names("mamba") | {
    # Files have the name without an ending.
    "ffn_norm": "pre_ff_layernorm.weight",
    "ffn_norm.weight": "pre_ff_layernorm.weight",
    "ffn_gate": "feed_forward.gate_proj",
    "ffn_up": "feed_forward.up_proj",
    "ffn_down": "feed_forward.down_proj",
}
FALCON_MODEL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.final_layernorm.weight",
    "output.weight": "lm_head.weight",
}
Change = Callable[[Any], Any]
"""Function from a tensor of a file to that of a checkpoint; torch is not imported here."""
MAMBA_CHANGES: Mapping[str, Change] = {
    # A file has −exp(A_log).
    "ssm_a": lambda rates: (-rates.flatten()).log(),
    "ssm_d": lambda skips: skips.flatten(),
    "ssm_norm.weight": lambda factors: factors.flatten(),
}
"""Conversion of a file's tensor to a checkpoint's, by the name after `blk.N.`."""


def lfm2(file: GgufFields, config: Config) -> Config:
    kinds = [FULL if heads else "conv" for heads in _heads_of_layers(file, config)]
    return {
        "norm_eps": config["rms_norm_eps"],
        "conv_L_cache": file.meta("shortconv.l_cache"),
        "layer_types": kinds,
        "block_auto_adjust_ff_dim": False,
        "num_dense_layers": file.meta("leading_dense_block_count", 0),
    }


def granite_hybrid(file: GgufFields, config: Config) -> Config:
    kinds = ["attention" if heads else "mamba" for heads in _heads_of_layers(file, config)]
    inner = config["intermediate_size"]
    return {
        **granite(file, config),
        "layer_types": kinds,
        "position_embedding_type": NO_ROPE,
        "num_local_experts": file.meta("expert_count", 0),
        "shared_intermediate_size": file.meta("expert_shared_feed_forward_length", inner),
        "mamba_n_heads": file.meta("ssm.time_step_rank"),
        "mamba_d_head": _head_dim(file),
        "mamba_d_state": file.meta("ssm.state_size"),
        "mamba_d_conv": file.meta("ssm.conv_kernel"),
        "mamba_n_groups": file.meta("ssm.group_count", 1),
    }


def nemotron_h(file: GgufFields, config: Config) -> Config:
    """Kinds of layers are those of their key heads and of the widths of their MLPs."""
    heads = _heads_of_layers(file, config)
    widths = file.meta("feed_forward_length")
    is_list = isinstance(widths, list) and len(widths) == len(heads)
    require(is_list, "feed_forward_length", widths, f"numbers of {len(heads)} layers")
    inner = "moe" if file.meta("expert_count", 0) else "mlp"
    kinds = [
        FULL if own else inner if width else LINEAR
        for own, width in zip(heads, widths, strict=True)
    ]
    return {
        "intermediate_size": max(widths),
        "layers_block_type": kinds,
        "mamba_num_heads": file.meta("ssm.time_step_rank"),
        "mamba_head_dim": _head_dim(file),
        "ssm_state_size": file.meta("ssm.state_size"),
        "conv_kernel": file.meta("ssm.conv_kernel"),
        "n_groups": file.meta("ssm.group_count"),
        "n_routed_experts": file.meta("expert_count", 1),
        "n_shared_experts": file.meta("expert_shared_count", 1),
        "moe_shared_expert_intermediate_size": file.meta("expert_shared_feed_forward_length", 1),
        "moe_latent_size": file.meta("moe_latent_size", None),
        "routed_scaling_factor": file.meta("expert_weights_scale", 1.0),
        "n_group": file.meta("expert_group_count", 1),
        "topk_group": file.meta("expert_group_used_count", 1),
    }


def falcon_h1(file: GgufFields, config: Config) -> Config:
    """Multipliers are in the weights of a file."""
    return {
        "mamba_d_ssm": file.meta("ssm.inner_size"),
        "mamba_n_heads": file.meta("ssm.time_step_rank"),
        "mamba_d_head": _head_dim(file),
        "mamba_d_state": file.meta("ssm.state_size"),
        "mamba_d_conv": file.meta("ssm.conv_kernel"),
        "mamba_n_groups": file.meta("ssm.group_count", 1),
        "mamba_rms_norm": file.shape_of("blk.0.ssm_norm.weight") is not None,
        "mamba_norm_before_gate": False,
    }


def _heads_of_layers(file: GgufFields, config: Config) -> list[int]:
    """Raises `ConfigError`."""
    heads = file.meta(HEADS_OF_LAYERS)
    num_layers = config["num_hidden_layers"]
    is_list = isinstance(heads, list) and len(heads) == num_layers
    require(is_list, HEADS_OF_LAYERS, heads, f"numbers of {num_layers} layers")
    return [int(each) for each in heads]


def _head_dim(file: GgufFields) -> Any:
    """Numbers of a head of Mamba-2. Raises `ConfigError`."""
    inner = file.meta("ssm.inner_size")
    heads = file.meta("ssm.time_step_rank")
    are_counts = type(inner) is int and type(heads) is int and heads > 0
    allowed = f"a multiple of ssm.time_step_rank ({heads})"
    require(are_counts and inner % heads == 0, "ssm.inner_size", inner, allowed)
    return inner // heads
