"""Families of models in GGUF files: their names of tensors, and what a file says of them. Knows
nothing about bytes.

Source: llama.cpp's converter, `conversion/*.py` of 2026, and tensor names of the package gguf."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from ...config import require

FULL = "full_attention"
SLIDING = "sliding_attention"
GEMMA_ACTIVATION = "gelu_pytorch_tanh"
ROPE_FACTORS = "rope_freqs.weight"
LONG_FACTORS = "rope_factors_long.weight"
SHORT_FACTORS = "rope_factors_short.weight"
UNROTATED = 1e29
"""Factors of frequencies above which a pair of numbers does not rotate."""


class GgufFields(Protocol):
    """Metadata of a file, and its tensors."""

    def meta(self, key: str, default: Any = ...) -> Any:
        """The value of `<architecture>.<key>`. Raises `ConfigError` where there is neither a value
        nor a default."""

    def shape_of(self, name: str) -> tuple[int, ...] | None:
        """Outputs and inputs of a tensor; None: the file has none of that name."""

    def numbers_of(self, name: str) -> list[float]:
        """The numbers of a small tensor."""


Config = dict[str, Any]
Names = Mapping[str, str]
EMBEDDING = "token_embd.weight"
MODEL_NAMES = {
    EMBEDDING: "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
NORMS_BEHIND = LAYER_NAMES | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
JOINED = LAYER_NAMES | {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
GEMMA4_NAMES = NORMS_BEHIND | {
    "layer_output_scale": "layer_scalar",
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
}
GEMMA4_MODEL_NAMES = MODEL_NAMES | {
    "per_layer_token_embd.weight": "model.embed_tokens_per_layer.weight",
    "per_layer_model_proj.weight": "model.per_layer_model_projection.weight",
    "per_layer_proj_norm.weight": "model.per_layer_projection_norm.weight",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufFamily:
    architecture: str
    """Name in a Hugging Face config."""
    also: tuple[str, ...] = ()
    """Further architectures whose files have the same name."""
    layer_names: Names = field(default_factory=lambda: LAYER_NAMES)
    """Names behind `model.layers.N.`, by those behind `blk.N.`"""
    model_names: Names = field(default_factory=lambda: MODEL_NAMES)
    is_permuted: bool = False
    """Whether rows of queries and keys are interleaved; ours rotate halves."""
    norm_offset: float = 0.0
    """Added to the factors of norms by the converter."""
    rotates_parts: bool = False
    """Whether a file may say that a part of a head rotates."""
    has_stacks: bool = False
    """Whether checkpoints have a tensor of all experts of a layer, as files do; see
    `gguf_stacks`."""
    fields_read_factors: bool = False
    """Whether `fields` reads tensors of rotary positions."""
    fields: Callable[[GgufFields, Config], Config] = lambda file, config: {}
    """Fields of a Hugging Face config beside those that all families have."""


def _gemma(file: GgufFields, config: Config) -> Config:
    return {"hidden_activation": GEMMA_ACTIVATION}


def _gemma2(file: GgufFields, config: Config) -> Config:
    return {
        "hidden_activation": GEMMA_ACTIVATION,
        "query_pre_attn_scalar": _scalar_of(config, GEMMA2_27B_LAYERS),
        "sliding_window": file.meta("attention.sliding_window", 4096),
        "attn_logit_softcapping": file.meta("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": file.meta("final_logit_softcapping", 30.0),
    }


GEMMA2_27B_LAYERS = 46
GEMMA3_27B_LAYERS = 62
"""Layers of the models of Gemma whose scores are scaled by hidden size and heads; a file does not
state it."""


def _gemma3(file: GgufFields, config: Config) -> Config:
    return {
        "hidden_activation": GEMMA_ACTIVATION,
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


def _gemma4(file: GgufFields, config: Config) -> Config:
    experts = file.meta("expert_count", 0)
    require(not experts, "gemma4.expert_count", experts, "none")
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
        "hidden_activation": GEMMA_ACTIVATION,
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


def _phi3(file: GgufFields, config: Config) -> Config:
    fields: Config = {"sliding_window": file.meta("attention.sliding_window", 0) or None}
    rotated = file.meta("rope.dimension_count", config["head_dim"])
    if rotated != config["head_dim"]:
        fields["partial_rotary_factor"] = rotated / config["head_dim"]
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


def _olmo2(file: GgufFields, config: Config) -> Config:
    """OLMo 3 where layers have a window."""
    window = file.meta("attention.sliding_window", None)
    if window is None:
        return {}
    return {"architectures": ["Olmo3ForCausalLM"], "sliding_window": window, **_kinds(file, config)}


def _exaone4(file: GgufFields, config: Config) -> Config:
    window = file.meta("attention.sliding_window", None)
    return {"sliding_window": window, **({} if window is None else _kinds(file, config))}


def _kinds(file: GgufFields, config: Config) -> Config:
    """Which layers have a window."""
    pattern = file.meta("attention.sliding_window_pattern", None)
    if isinstance(pattern, list):
        return {"layer_types": [SLIDING if windowed else FULL for windowed in pattern]}
    return {} if pattern is None else {"sliding_window_pattern": pattern}


def _gpt_oss(file: GgufFields, config: Config) -> Config:
    scaling = config["rope_scaling"]
    return {
        "sliding_window": file.meta("attention.sliding_window"),
        "intermediate_size": file.meta("expert_feed_forward_length"),
        "rope_scaling": scaling and {**GPT_OSS_YARN, **scaling},
    }


GPT_OSS_YARN = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
"""Fields of scaled positions that a file of gpt-oss does not state."""


def _granite(file: GgufFields, config: Config) -> Config:
    keys = {
        "attention.scale": "attention_multiplier",
        "embedding_scale": "embedding_multiplier",
        "residual_scale": "residual_multiplier",
        "logit_scale": "logits_scaling",
    }
    return {field: file.meta(key, 1.0) for key, field in keys.items()}


FAMILIES = {
    "ernie4_5": GgufFamily(architecture="Ernie4_5ForCausalLM"),
    "exaone4": GgufFamily(
        architecture="Exaone4ForCausalLM", layer_names=NORMS_BEHIND, fields=_exaone4
    ),
    "gemma": GgufFamily(architecture="GemmaForCausalLM", norm_offset=1.0, fields=_gemma),
    "gemma2": GgufFamily(
        architecture="Gemma2ForCausalLM",
        layer_names=NORMS_BEHIND,
        norm_offset=1.0,
        fields=_gemma2,
    ),
    "gemma3": GgufFamily(
        architecture="Gemma3ForCausalLM",
        layer_names=NORMS_BEHIND,
        norm_offset=1.0,
        fields=_gemma3,
    ),
    "gemma4": GgufFamily(
        architecture="Gemma4ForCausalLM",
        layer_names=GEMMA4_NAMES,
        model_names=GEMMA4_MODEL_NAMES,
        fields_read_factors=True,
        fields=_gemma4,
    ),
    "gpt-oss": GgufFamily(
        architecture="GptOssForCausalLM",
        layer_names=LAYER_NAMES
        | {
            "post_attention_norm": "post_attention_layernorm",
            "attn_sinks": "self_attn.sinks",
            "ffn_gate_inp": "mlp.router",
        },
        has_stacks=True,
        fields=_gpt_oss,
    ),
    "granite": GgufFamily(architecture="GraniteForCausalLM", is_permuted=True, fields=_granite),
    "llama": GgufFamily(
        architecture="LlamaForCausalLM", also=("MixtralForCausalLM",), is_permuted=True
    ),
    "mistral": GgufFamily(architecture="MistralForCausalLM", is_permuted=True),
    "olmo2": GgufFamily(
        architecture="Olmo2ForCausalLM",
        also=("Olmo3ForCausalLM",),
        layer_names=NORMS_BEHIND,
        fields=_olmo2,
    ),
    "olmoe": GgufFamily(architecture="OlmoeForCausalLM"),
    "phi3": GgufFamily(
        architecture="Phi3ForCausalLM",
        layer_names=JOINED,
        rotates_parts=True,
        fields_read_factors=True,
        fields=_phi3,
    ),
    "qwen2": GgufFamily(architecture="Qwen2ForCausalLM"),
    "qwen2moe": GgufFamily(architecture="Qwen2MoeForCausalLM"),
    "qwen3": GgufFamily(architecture="Qwen3ForCausalLM"),
    "qwen3moe": GgufFamily(architecture="Qwen3MoeForCausalLM"),
    "seed_oss": GgufFamily(
        architecture="SeedOssForCausalLM",
        layer_names=LAYER_NAMES | {"post_attention_norm": "post_attention_layernorm"},
    ),
    "smollm3": GgufFamily(architecture="SmolLM3ForCausalLM", is_permuted=True),
}
"""By `general.architecture`."""


def architectures() -> set[str]:
    """Hugging Face's names of architectures whose GGUF files are read."""
    return {name for each in FAMILIES.values() for name in (each.architecture, *each.also)}
