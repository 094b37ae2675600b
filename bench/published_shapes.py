"""Shapes of published models with windows or state layers: what their config.json says of it.
Vocabularies and MLPs are cut, which no cache depends on."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

_ANY: dict[str, Any] = {
    "intermediate_size": 512,
    "vocab_size": 1024,
    "max_position_embeddings": 32_768,
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
}


def _qwen(hidden: int, layers: int, heads: int, kv_heads: int, keys: int, values: int) -> Any:
    return _ANY | {
        "architectures": ["Qwen3_5ForCausalLM"],
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 256,
        "linear_num_key_heads": keys,
        "linear_num_value_heads": values,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "rms_norm_eps": 1e-6,
    }


def _nemotron(
    hidden: int, pattern: str, kv_heads: int, heads: int, head_dim: int, state: int
) -> Any:
    return _ANY | {
        "architectures": ["NemotronHForCausalLM"],
        "hidden_size": hidden,
        "num_hidden_layers": len(pattern),
        "hybrid_override_pattern": pattern,
        "num_attention_heads": 32,
        "num_key_value_heads": kv_heads,
        "head_dim": 128,
        "mamba_num_heads": heads,
        "mamba_head_dim": head_dim,
        "ssm_state_size": state,
        "n_groups": 8,
        "layer_norm_epsilon": 1e-5,
        "mlp_hidden_act": "relu2",
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 512,
        "moe_shared_expert_intermediate_size": 512,
    }


def _granite(hidden: int, layers: int, heads: int, kv_heads: int, states: int, size: int) -> Any:
    attention = {10, 13, 17, 27} if layers == 32 else {5, 15, 25, 35}
    return _ANY | {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "hidden_size": hidden,
        "shared_intermediate_size": 512,
        "num_local_experts": 0,
        "num_hidden_layers": layers,
        "layer_types": ["attention" if i in attention else "mamba" for i in range(layers)],
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "mamba_n_heads": states,
        "mamba_d_head": size,
        "mamba_d_state": 128,
        "mamba_n_groups": 1,
        "position_embedding_type": "nope",
        "embedding_multiplier": 12.0,
        "logits_scaling": 8.0,
        "residual_multiplier": 0.22,
        "attention_multiplier": 0.0078125,
        "rms_norm_eps": 1e-5,
    }


def _falcon(layers: int, heads: int, kv_heads: int, head_dim: int, states: int, size: int) -> Any:
    return _ANY | {
        "architectures": ["FalconH1ForCausalLM"],
        "hidden_size": heads * head_dim,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "mamba_d_ssm": states * size,
        "mamba_n_heads": states,
        "mamba_d_head": size,
        "mamba_d_state": 128 if head_dim == 64 else 256,
        "mamba_n_groups": 2 if kv_heads == 4 else 1,
        "rope_theta": 1e11,
        "rms_norm_eps": 1e-5,
    }


def _lfm(hidden: int, layers: int, heads: int, full: Collection[int]) -> Any:
    return _ANY | {
        "architectures": ["Lfm2ForCausalLM"],
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "layer_types": ["full_attention" if i in full else "conv" for i in range(layers)],
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "conv_L_cache": 3,
        "block_auto_adjust_ff_dim": False,
        "norm_eps": 1e-5,
    }


def _gemma(hidden: int, layers: int, heads: int, kv_heads: int, window: int) -> Any:
    return _ANY | {
        "architectures": ["Gemma3ForCausalLM"],
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 256,
        "sliding_window": window,
        "sliding_window_pattern": 6,
        "query_pre_attn_scalar": 256,
        "rope_local_base_freq": 10_000.0,
        "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": 1e-6,
    }


_H8 = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"
_SIX = (2, 5, 8, 10, 12, 14)
WINDOWS: dict[str, dict[str, Any]] = {
    "Gemma-3-270M": _gemma(640, 18, 4, 1, 512),
    "Gemma-3-4B": _gemma(2560, 34, 8, 4, 1024),
}
"""Keyed by name of a checkpoint, models in which most layers see a window."""
STATES: dict[str, dict[str, Any]] = {
    "Qwen3-Next-80B-A3B": _qwen(2048, 48, 16, 2, 16, 32),
    "Qwen3.6-35B-A3B": _qwen(2048, 40, 16, 2, 16, 32),
    "Qwen3.5-122B-A10B": _qwen(3072, 48, 32, 2, 16, 64),
    "Qwen3.5-397B-A17B": _qwen(4096, 60, 32, 2, 16, 64),
    "Qwen3.6-27B": _qwen(5120, 64, 24, 4, 16, 48),
    "Qwen3.5-9B": _qwen(4096, 32, 16, 4, 16, 32),
    "Qwen3.5-2B": _qwen(2048, 24, 8, 2, 16, 16),
    "Nemotron-H-8B": _nemotron(4096, _H8, 8, 128, 64, 128),
    "Nemotron-H-47B": _nemotron(8192, "M-" * 9 + ("*-" + "M-" * 9) * 4 + "*-", 8, 256, 64, 256),
    "Nemotron-Nano-9B-v2": _nemotron(
        4480, "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-", 8, 128, 80, 128
    ),
    "Nemotron-3-Nano-30B-A3B": _nemotron(
        2688, "MEMEM*E" + "MEMEM*E" * 4 + "MEMEMEM*E" + "ME" * 4, 2, 64, 64, 128
    ),
    "Granite-4.0-H-Micro": _granite(2048, 40, 32, 8, 64, 64),
    "Granite-4.0-H-Tiny": _granite(1536, 40, 12, 4, 48, 64),
    "Granite-4.0-H-Small": _granite(4096, 40, 32, 8, 128, 64),
    "Granite-4.0-H-350M": _granite(768, 32, 12, 4, 48, 32),
    "Falcon-H1-0.5B": _falcon(36, 8, 2, 64, 24, 64),
    "Falcon-H1-1.5B": _falcon(24, 8, 2, 128, 48, 64),
    "Falcon-H1-1.5B-Deep": _falcon(66, 6, 2, 128, 24, 64),
    "Falcon-H1-3B": _falcon(32, 10, 2, 128, 32, 128),
    "Falcon-H1-7B": _falcon(44, 12, 2, 128, 24, 128),
    "Falcon-H1-34B": _falcon(72, 20, 4, 128, 32, 128),
    "LFM2-350M": _lfm(1024, 16, 16, _SIX),
    "LFM2-1.2B": _lfm(2048, 16, 32, _SIX),
    "LFM2-2.6B": _lfm(2048, 30, 32, (2, 6, 10, 14, 18, 22, 26, 29)),
    "LFM2-8B-A1B": _lfm(2048, 24, 32, (2, 6, 10, 14, 18, 21)),
}
"""Keyed by name of a checkpoint, models in which most layers keep a state. Experts are left out."""
