"""Fields of a Hugging Face config that the metadata of a GGUF file stands for, by family. Knows
nothing about bytes.

Source: llama.cpp's converter, `conversion/*.py` of 2026."""

from __future__ import annotations

from typing import Any, Protocol

from ...config import require

FULL = "full_attention"
SLIDING = "sliding_attention"
GELU_TANH = "gelu_pytorch_tanh"
ROPE_FACTORS = "rope_freqs.weight"
LONG_FACTORS = "rope_factors_long.weight"
SHORT_FACTORS = "rope_factors_short.weight"
UNROTATED = 1e29
"""Factors of frequencies above which a pair of numbers does not rotate."""
Config = dict[str, Any]


class GgufFields(Protocol):
    """Metadata of a file, and its tensors."""

    def meta(self, key: str, default: Any = ...) -> Any:
        """The value of `<architecture>.<key>`. Raises `ConfigError` where there is neither a value
        nor a default."""

    def shape_of(self, name: str) -> tuple[int, ...] | None:
        """Outputs and inputs of a tensor; None: the file has none of that name."""

    def numbers_of(self, name: str) -> list[float]:
        """The numbers of a small tensor."""


def cohere2(file: GgufFields, config: Config) -> Config:
    return {
        "logit_scale": file.meta("logit_scale"),
        "sliding_window": file.meta("attention.sliding_window"),
        **_kinds(file, config),
    }


def glm4(file: GgufFields, config: Config) -> Config:
    sections = file.meta("rope.dimension_sections", None)
    require(sections is None, "rope.dimension_sections", sections, "none: models of text")
    return {}


def gpt2(file: GgufFields, config: Config) -> Config:
    return {"activation_function": "gelu_new", "n_inner": config["intermediate_size"]}


def gpt_neox(file: GgufFields, config: Config) -> Config:
    return {
        "hidden_act": "gelu",
        "use_parallel_residual": file.meta("use_parallel_residual", True),
        "attention_bias": file.shape_of("blk.0.attn_qkv.bias") is not None,
    }


def mistral3(file: GgufFields, config: Config) -> Config:
    """Ministral 3 where queries grow behind the original length."""
    beta = file.meta("attention.temperature_scale", 0.0)
    scaling = config["rope_scaling"]
    allowed = "0 without rope.scaling.original_context_length"
    require(not beta or scaling, "attention.temperature_scale", beta, allowed)
    return {"rope_scaling": {**scaling, "llama_4_scaling_beta": beta}} if beta else {}


def starcoder2(file: GgufFields, config: Config) -> Config:
    return {"hidden_act": GELU_TANH, "use_bias": config["attention_bias"]}


def gemma(file: GgufFields, config: Config) -> Config:
    return {"hidden_activation": GELU_TANH}


def gemma2(file: GgufFields, config: Config) -> Config:
    return {
        "hidden_activation": GELU_TANH,
        "query_pre_attn_scalar": _scalar_of(config, GEMMA2_27B_LAYERS),
        "sliding_window": file.meta("attention.sliding_window", 4096),
        "attn_logit_softcapping": file.meta("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": file.meta("final_logit_softcapping", 30.0),
    }


GEMMA2_27B_LAYERS = 46
GEMMA3_27B_LAYERS = 62
"""Layers of the models of Gemma whose scores are scaled by hidden size and heads; a file does not
state it."""


def gemma3(file: GgufFields, config: Config) -> Config:
    return {
        "hidden_activation": GELU_TANH,
        "query_pre_attn_scalar": _scalar_of(config, GEMMA3_27B_LAYERS),
        "sliding_window": file.meta("attention.sliding_window"),
        "sliding_window_pattern": file.meta("attention.sliding_window_pattern", 6),
        "rope_theta": file.meta("rope.freq_base", 1_000_000.0),
        "rope_local_base_freq": file.meta("rope.freq_base_swa", 10_000.0),
        "attn_logit_softcapping": file.meta("attn_logit_softcapping", None),
        "final_logit_softcapping": file.meta("final_logit_softcapping", None),
    }


def _scalar_of(config: Config, layers_of_27b: int) -> Any:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    is_known = isinstance(hidden, int) and isinstance(heads, int) and heads > 0
    if config["num_hidden_layers"] != layers_of_27b or not is_known:
        return config["head_dim"]
    return hidden // heads


def gemma4(file: GgufFields, config: Config) -> Config:
    num_layers = config["num_hidden_layers"]
    pattern = file.meta("attention.sliding_window_pattern")
    is_list = isinstance(pattern, list) and len(pattern) == num_layers
    allowed = f"{num_layers} of true and false"
    require(is_list, "attention.sliding_window_pattern", pattern, allowed)
    kinds = [SLIDING if windowed else FULL for windowed in pattern]
    kinds[-1] = FULL
    shared = file.meta("attention.shared_kv_layers", 0)
    global_dim = file.meta("attention.key_length")
    head_dim = file.meta("attention.key_length_swa", global_dim)
    widths = file.meta("feed_forward_length")
    inner = widths if isinstance(widths, list) else [widths]
    table = file.shape_of("per_layer_token_embd.weight")
    full, local = kinds.index(FULL), kinds.index(SLIDING) if SLIDING in kinds else None
    heads = _kv_heads(file, full, global_dim)
    return {
        "hidden_activation": GELU_TANH,
        "enable_moe_block": bool(file.meta("expert_count", 0)),
        "top_k_experts": file.meta("expert_used_count", None),
        "layer_types": kinds,
        "head_dim": head_dim,
        "global_head_dim": global_dim,
        "num_key_value_heads": heads if local is None else _kv_heads(file, local, head_dim),
        "num_global_key_value_heads": heads,
        "attention_k_eq_v": file.shape_of(f"blk.{full}.attn_v.weight") is None,
        "per_layer_config": {
            str(i): {"head_dim": global_dim, "num_key_value_heads": heads}
            for i, kind in enumerate(kinds)
            if kind == FULL
        },
        "num_kv_shared_layers": shared,
        "intermediate_size": inner[0],
        "use_double_wide_mlp": inner[-1] != inner[0],
        "hidden_size_per_layer_input": file.meta("embedding_length_per_layer_input", 0),
        "vocab_size_per_layer_input": config["vocab_size"] if table is None else table[0],
        "sliding_window": file.meta("attention.sliding_window"),
        "final_logit_softcapping": file.meta("final_logit_softcapping", None),
        "rope_scaling": None,
        "rope_parameters": {
            FULL: _proportional(file),
            SLIDING: {
                "rope_type": "default",
                "rope_theta": file.meta("rope.freq_base_swa", 10_000.0),
            },
        },
    }


def _kv_heads(file: GgufFields, layer: int, head_dim: int) -> int:
    """Key heads of a layer, by the outputs of its projection."""
    name = f"blk.{layer}.attn_k.weight"
    shape = file.shape_of(name)
    is_whole = shape is not None and isinstance(head_dim, int) and head_dim > 0
    is_whole = is_whole and shape is not None and shape[0] % head_dim == 0
    require(is_whole, f"tensor {name}", shape, f"whole heads of {head_dim}")
    assert shape is not None
    return shape[0] // head_dim


def _proportional(file: GgufFields) -> Config:
    """Rotary positions of layers that see all keys, of which the file has factors."""
    theta = file.meta("rope.freq_base", 1_000_000.0)
    factors = file.numbers_of(ROPE_FACTORS)
    num_rotated = sum(factor < UNROTATED for factor in factors)
    expected = [1.0] * num_rotated
    allowed = "1 for pairs that rotate, before those that do not"
    require(factors[:num_rotated] == expected, f"tensor {ROPE_FACTORS}", factors[:8], allowed)
    share = num_rotated / len(factors)
    return {"rope_type": "proportional", "partial_rotary_factor": share, "rope_theta": theta}


def phi3(file: GgufFields, config: Config) -> Config:
    fields: Config = {"sliding_window": file.meta("attention.sliding_window", 0) or None}
    original = file.meta("rope.scaling.original_context_length", None)
    if file.shape_of(LONG_FACTORS) is None:
        return fields
    scaling = {
        "rope_type": "longrope",
        "long_factor": file.numbers_of(LONG_FACTORS),
        "short_factor": file.numbers_of(SHORT_FACTORS),
    }
    if (factor := file.meta("rope.scaling.attn_factor", None)) is not None:
        scaling["attention_factor"] = factor
    fields["rope_scaling"] = scaling
    if original is not None:
        fields["original_max_position_embeddings"] = original
    return fields


def olmo2(file: GgufFields, config: Config) -> Config:
    """OLMo 3 where layers have a window."""
    window = file.meta("attention.sliding_window", None)
    if window is None:
        return {}
    return {"architectures": ["Olmo3ForCausalLM"], "sliding_window": window, **_kinds(file, config)}


def exaone4(file: GgufFields, config: Config) -> Config:
    window = file.meta("attention.sliding_window", None)
    return {"sliding_window": window, **({} if window is None else _kinds(file, config))}


def _kinds(file: GgufFields, config: Config) -> Config:
    """Kinds of layers, with a window or without."""
    pattern = file.meta("attention.sliding_window_pattern", None)
    if isinstance(pattern, list):
        return {"layer_types": [SLIDING if windowed else FULL for windowed in pattern]}
    return {} if pattern is None else {"sliding_window_pattern": pattern}


def granite(file: GgufFields, config: Config) -> Config:
    keys = {
        "attention.scale": "attention_multiplier",
        "embedding_scale": "embedding_multiplier",
        "residual_scale": "residual_multiplier",
        "logit_scale": "logits_scaling",
    }
    return {field: file.meta(key, 1.0) for key, field in keys.items()}
