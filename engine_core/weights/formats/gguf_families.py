"""Families of models in GGUF files: their names of tensors, and what a file says of them. Knows
nothing about bytes.

Source: llama.cpp's converter, `conversion/*.py` of 2026, and tensor names of the package gguf."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from . import gguf_delta, gguf_experts, gguf_fields, gguf_latents, gguf_states
from .gguf_fields import Config, GgufFields

Names = Mapping[str, str]
EMBEDDING = "token_embd.weight"
RMS_EPS = "rms_norm_eps"
"""Field of families whose norms are RMS norms; layer norms have others."""
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
    "exp_probs_b": "mlp.gate.e_score_correction_bias",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
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
GLM4_NAMES = JOINED | {
    "post_attention_norm": "post_self_attn_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
}
GPT_OSS_NAMES = LAYER_NAMES | {
    "attn_sinks.weight": "self_attn.sinks",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.router",
}
STARCODER2_NAMES = LAYER_NAMES | {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}
STARCODER2_MODEL_NAMES = MODEL_NAMES | {"output_norm.bias": "model.norm.bias"}
GPT_NEOX_NAMES = LAYER_NAMES | {"attn_qkv": "self_attn.qkv_proj"}
GPT_NEOX_MODEL_NAMES = {
    EMBEDDING: "model.embed_in.weight",
    "output_norm.weight": "model.final_layer_norm.weight",
    "output_norm.bias": "model.final_layer_norm.bias",
    "output.weight": "model.embed_out.weight",
}
GPT2_NAMES = GPT_NEOX_NAMES | {"attn_norm": "ln_1", "ffn_norm": "ln_2"}
GPT2_MODEL_NAMES = {
    EMBEDDING: "model.wte.weight",
    "position_embd.weight": "model.wpe.weight",
    "output_norm.weight": "model.ln_f.weight",
    "output_norm.bias": "model.ln_f.bias",
    "output.weight": "lm_head.weight",
}
GEMMA4_NAMES = NORMS_BEHIND | {
    "layer_output_scale": "layer_scalar",
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
    "ffn_gate_inp": "router.proj",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_down_exps.scale": "router.per_expert_scale",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
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
    """Names after `model.layers.N.`, by names after `blk.N.`; without `.weight` and `.bias`, or
    whole names where the suffixes differ."""
    model_names: Names = field(default_factory=lambda: MODEL_NAMES)
    is_permuted: bool = False
    """Whether rows of queries and keys are interleaved; ours rotate halves."""
    norm_eps: str = RMS_EPS
    """Field of a config with the constant that norms add to variances."""
    norm_offset: float = 0.0
    """Added to the factors of norms by the converter."""
    rotates_parts: bool = False
    """Whether a file may say that only part of a head is rotated."""
    fields_read_factors: bool = False
    """Whether `fields` reads tensors of rotary positions."""
    changed: Mapping[str, gguf_states.Change] = field(default_factory=dict)
    """Change that makes a file's tensor that of a checkpoint, by the name behind `blk.N.`."""
    joined: Mapping[str, gguf_latents.Joined] = field(default_factory=dict)
    """Tensors of a checkpoint that a file has in two, by the name of the first behind `blk.N.`."""
    rows: Callable[[GgufFields, str], list[int] | None] = lambda file, name: None
    columns: Callable[[GgufFields, str], list[int] | None] = lambda file, name: None
    """Rows or columns of a file's matrix in our order, by the name behind `blk.N.`; None: they have
    our order."""
    fields: Callable[[GgufFields, Config], Config] = lambda file, config: {}
    """Fields of a Hugging Face config beside those that all families have."""


DELTA_NETS: dict[str, Any] = {
    "layer_names": LAYER_NAMES | gguf_delta.NAMES,
    "norm_offset": 1.0,
    "rotates_parts": True,
    "changed": gguf_delta.CHANGES,
    "fields": gguf_delta.qwen3_5,
}
"""Fields of families with gated delta nets."""
LATENTS: dict[str, Any] = {
    "layer_names": LAYER_NAMES | gguf_latents.NAMES,
    "rotates_parts": True,
    "joined": gguf_latents.JOINED,
}
"""Fields of families with latent attention."""
FAMILIES = {
    "cohere2": GgufFamily(
        architecture="Cohere2ForCausalLM", norm_eps="layer_norm_eps", fields=gguf_fields.cohere2
    ),
    "deepseek2": GgufFamily(
        architecture="DeepseekV2ForCausalLM",
        also=(
            "DeepseekV3ForCausalLM",
            "Glm4MoeLiteForCausalLM",
            "KimiK25ForConditionalGeneration",
        ),
        **LATENTS,
        fields=gguf_latents.deepseek2,
    ),
    "deepseek32": GgufFamily(
        architecture="DeepseekV32ForCausalLM", **LATENTS, fields=gguf_latents.deepseek32
    ),
    "ernie4_5": GgufFamily(architecture="Ernie4_5ForCausalLM"),
    "ernie4_5-moe": GgufFamily(
        architecture="Ernie4_5_MoeForCausalLM", fields=gguf_experts.ernie45_moe
    ),
    "exaone4": GgufFamily(
        architecture="Exaone4ForCausalLM", layer_names=NORMS_BEHIND, fields=gguf_fields.exaone4
    ),
    "falcon-h1": GgufFamily(
        architecture="FalconH1ForCausalLM",
        layer_names=LAYER_NAMES | gguf_states.FALCON_NAMES,
        model_names=gguf_states.FALCON_MODEL_NAMES,
        changed=gguf_states.MAMBA_CHANGES,
        fields=gguf_states.falcon_h1,
    ),
    "gemma": GgufFamily(architecture="GemmaForCausalLM", norm_offset=1.0, fields=gguf_fields.gemma),
    "gemma2": GgufFamily(
        architecture="Gemma2ForCausalLM",
        layer_names=NORMS_BEHIND,
        norm_offset=1.0,
        fields=gguf_fields.gemma2,
    ),
    "gemma3": GgufFamily(
        architecture="Gemma3ForCausalLM",
        also=("Gemma3ForConditionalGeneration",),
        layer_names=NORMS_BEHIND,
        norm_offset=1.0,
        fields=gguf_fields.gemma3,
    ),
    "gemma4": GgufFamily(
        architecture="Gemma4ForCausalLM",
        also=("Gemma4ForConditionalGeneration",),
        layer_names=GEMMA4_NAMES,
        model_names=GEMMA4_MODEL_NAMES,
        fields_read_factors=True,
        fields=gguf_fields.gemma4,
    ),
    "glm4": GgufFamily(
        architecture="Glm4ForCausalLM",
        layer_names=GLM4_NAMES,
        rotates_parts=True,
        fields=gguf_fields.glm4,
    ),
    "glm-dsa": GgufFamily(
        architecture="GlmMoeDsaForCausalLM", **LATENTS, fields=gguf_latents.deepseek32
    ),
    "glm4moe": GgufFamily(
        architecture="Glm4MoeForCausalLM",
        layer_names=LAYER_NAMES | {"post_attention_norm": "post_attention_layernorm"},
        rotates_parts=True,
        fields=gguf_experts.glm4_moe,
    ),
    "gpt-oss": GgufFamily(
        architecture="GptOssForCausalLM",
        layer_names=GPT_OSS_NAMES,
        fields=gguf_experts.gpt_oss,
    ),
    "gpt2": GgufFamily(
        architecture="GPT2LMHeadModel",
        layer_names=GPT2_NAMES,
        model_names=GPT2_MODEL_NAMES,
        norm_eps="layer_norm_epsilon",
        fields=gguf_fields.gpt2,
    ),
    "gptneox": GgufFamily(
        architecture="GPTNeoXForCausalLM",
        layer_names=GPT_NEOX_NAMES,
        model_names=GPT_NEOX_MODEL_NAMES,
        norm_eps="layer_norm_eps",
        rotates_parts=True,
        fields=gguf_fields.gpt_neox,
    ),
    "granite": GgufFamily(
        architecture="GraniteForCausalLM", is_permuted=True, fields=gguf_fields.granite
    ),
    "granitehybrid": GgufFamily(
        architecture="GraniteMoeHybridForCausalLM",
        is_permuted=True,
        layer_names=LAYER_NAMES | gguf_states.GRANITE_NAMES,
        changed=gguf_states.MAMBA_CHANGES,
        fields=gguf_states.granite_hybrid,
    ),
    "granitemoe": GgufFamily(
        architecture="GraniteMoeForCausalLM", is_permuted=True, fields=gguf_fields.granite
    ),
    "hy_v3": GgufFamily(architecture="HYV3ForCausalLM", fields=gguf_experts.hy3),
    "lfm2": GgufFamily(
        architecture="Lfm2ForCausalLM",
        layer_names=gguf_states.LFM2_NAMES,
        model_names=gguf_states.LFM2_MODEL_NAMES,
        fields=gguf_states.lfm2,
    ),
    "lfm2moe": GgufFamily(
        architecture="Lfm2MoeForCausalLM",
        layer_names=gguf_states.LFM2_NAMES,
        model_names=gguf_states.LFM2_MODEL_NAMES,
        fields=gguf_states.lfm2,
    ),
    "llama": GgufFamily(
        architecture="LlamaForCausalLM",
        also=("InternLM3ForCausalLM", "MixtralForCausalLM"),
        is_permuted=True,
    ),
    "minicpm3": GgufFamily(
        architecture="MiniCPM3ForCausalLM",
        **LATENTS,
        fields_read_factors=True,
        fields=gguf_latents.minicpm3,
    ),
    "minimax-m2": GgufFamily(
        architecture="MiniMaxM2ForCausalLM",
        rotates_parts=True,
        fields=gguf_experts.minimax_m2,
    ),
    "mistral": GgufFamily(architecture="MistralForCausalLM", is_permuted=True),
    "mistral3": GgufFamily(
        architecture="Ministral3ForCausalLM",
        also=("Mistral3ForConditionalGeneration",),
        is_permuted=True,
        fields=gguf_fields.mistral3,
    ),
    "nemotron_h": GgufFamily(
        architecture="NemotronHForCausalLM",
        layer_names=gguf_states.NEMOTRON_NAMES,
        model_names=gguf_states.NEMOTRON_MODEL_NAMES,
        norm_eps="layer_norm_epsilon",
        changed=gguf_states.MAMBA_CHANGES,
        fields=gguf_states.nemotron_h,
    ),
    "nemotron_h_moe": GgufFamily(
        architecture="NemotronHForCausalLM",
        layer_names=gguf_states.NEMOTRON_NAMES,
        model_names=gguf_states.NEMOTRON_MODEL_NAMES,
        norm_eps="layer_norm_epsilon",
        changed=gguf_states.MAMBA_CHANGES,
        fields=gguf_states.nemotron_h,
    ),
    "olmo2": GgufFamily(
        architecture="Olmo2ForCausalLM",
        also=("Olmo3ForCausalLM",),
        layer_names=NORMS_BEHIND,
        fields=gguf_fields.olmo2,
    ),
    "olmoe": GgufFamily(architecture="OlmoeForCausalLM"),
    "phi3": GgufFamily(
        architecture="Phi3ForCausalLM",
        layer_names=JOINED,
        rotates_parts=True,
        fields_read_factors=True,
        fields=gguf_fields.phi3,
    ),
    "qwen2": GgufFamily(architecture="Qwen2ForCausalLM"),
    "qwen2moe": GgufFamily(architecture="Qwen2MoeForCausalLM"),
    "qwen2vl": GgufFamily(architecture="Qwen2_5_VLForConditionalGeneration"),
    "qwen3": GgufFamily(architecture="Qwen3ForCausalLM"),
    "qwen35": GgufFamily(
        architecture="Qwen3_5ForCausalLM",
        also=("Qwen3_5ForConditionalGeneration",),
        **DELTA_NETS,
        rows=gguf_delta.rows_in_turns,
        columns=gguf_delta.columns_in_turns,
    ),
    "qwen35moe": GgufFamily(
        architecture="Qwen3_5MoeForCausalLM",
        also=("Qwen3_5MoeForConditionalGeneration",),
        **DELTA_NETS,
        rows=gguf_delta.rows_in_turns,
        columns=gguf_delta.columns_in_turns,
    ),
    # As in Qwen3.5's files, projections are ordered by kind.
    "qwen3next": GgufFamily(
        architecture="Qwen3_5MoeForCausalLM",
        also=("Qwen3NextForCausalLM",),
        **DELTA_NETS,
        rows=gguf_delta.rows_of,
    ),
    "qwen3moe": GgufFamily(architecture="Qwen3MoeForCausalLM"),
    "qwen3vl": GgufFamily(architecture="Qwen3VLForConditionalGeneration"),
    "seed_oss": GgufFamily(
        architecture="SeedOssForCausalLM",
        layer_names=LAYER_NAMES | {"post_attention_norm": "post_attention_layernorm"},
    ),
    "smollm3": GgufFamily(architecture="SmolLM3ForCausalLM", is_permuted=True),
    "starcoder2": GgufFamily(
        architecture="Starcoder2ForCausalLM",
        layer_names=STARCODER2_NAMES,
        model_names=STARCODER2_MODEL_NAMES,
        norm_eps="norm_epsilon",
        fields=gguf_fields.starcoder2,
    ),
}
"""Keyed by `general.architecture`."""


def architectures() -> set[str]:
    """Hugging Face's names of architectures whose GGUF files are read."""
    return {name for each in FAMILIES.values() for name in (each.architecture, *each.also)}
