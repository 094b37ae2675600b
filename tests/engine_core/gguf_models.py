"""Small models whose GGUF files llama.cpp's converter has written to `gguf_files`
(`make_gguf_files.py`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456"
SPECIAL = ["<s>", "</s>", "<|endoftext|>", "<|user|>"]
TOKENS = [*SPECIAL, *LETTERS, "ab"]
PROMPT = [4 + i * i % 59 for i in range(70)]
WINDOW = 16
SHAPE = {
    "vocab_size": len(TOKENS),
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}
TIED = SHAPE | {"tie_word_embeddings": True}
HEADS_OF_32 = SHAPE | {"head_dim": 32, "tie_word_embeddings": True}
WINDOWS = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0 + i / 10 for i in range(4)],
    "long_factor": [2.0 + i for i in range(4)],
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
GEMMA4 = SHAPE | {
    "num_hidden_layers": 4,
    "intermediate_size": 16,
    "pad_token_id": 0,
    "layer_types": 2 * ["sliding_attention", "full_attention"],
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": WINDOW,
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": len(TOKENS),
    "final_logit_softcapping": 8.0,
    "tie_word_embeddings": True,
}
FULL = "full_attention"
MAMBA = "linear_attention"
DELTA = SHAPE | {
    **{"head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4},
    **{"linear_key_head_dim": 32, "linear_value_head_dim": 32},
    **{"num_hidden_layers": 4, "layer_types": 3 * [MAMBA] + [FULL]},
}
FALCON_H1 = SHAPE | {
    **{"pad_token_id": 0, "head_dim": 16, "mamba_d_ssm": 64, "mamba_n_heads": 4},
    **{"mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 2, "mamba_chunk_size": 16},
    **{"embedding_multiplier": 4.0, "lm_head_multiplier": 0.5, "key_multiplier": 0.5},
    **{"attention_in_multiplier": 2.0, "attention_out_multiplier": 0.5},
    **{"ssm_in_multiplier": 2.0, "ssm_out_multiplier": 0.5, "mlp_multipliers": [0.5, 0.25]},
    "ssm_multipliers": [0.5, 0.25, 0.5, 1.0, 0.5],
}
"""Multipliers are powers of two: the converter rounds weights after it has multiplied them."""
GRANITE_HYBRID = SHAPE | {
    **{"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1},
    **{"layer_types": [MAMBA, FULL], "shared_intermediate_size": 32},
    "max_position_embeddings": 1 << 20,
    **{"embedding_multiplier": 12.0, "logits_scaling": 8.0},
    **{"residual_multiplier": 0.22, "attention_multiplier": 0.05},
}
NEMOTRON_H = {name: value for name, value in SHAPE.items() if name != "num_hidden_layers"} | {
    **{"pad_token_id": 0, "head_dim": 16, "mamba_num_heads": 4, "mamba_head_dim": 16},
    **{"ssm_state_size": 16, "n_groups": 2, "chunk_size": 16, "time_step_min": 1e-30},
    "max_position_embeddings": 1 << 20,
}
LATENT = SHAPE | {
    **{"kv_lora_rank": 32, "q_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32},
    **{"v_head_dim": 16, "num_key_value_heads": 2, "pad_token_id": 0},
}
ROUTED = {
    **{"first_k_dense_replace": 1, "n_routed_experts": 4, "num_experts_per_tok": 2},
    **{"n_shared_experts": 2, "moe_intermediate_size": 16, "routed_scaling_factor": 1.5},
}
INDEXED = {"index_n_heads": 16, "index_head_dim": 128, "index_topk": 24}
MSCALE = {"mscale": 0.707, "mscale_all_dim": 0.707}
VISION = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
FAMILIES: dict[str, Callable[[], Any]] = {
    "cohere2": lambda: transformers.Cohere2Config(
        **TIED | {"num_hidden_layers": 4, "sliding_window": WINDOW, "logit_scale": 0.5}
    ),
    "deepseek-v2": lambda: transformers.DeepseekV2Config(
        **LATENT | {"rope_parameters": YARN | MSCALE},
        **ROUTED | {"n_group": 2, "topk_group": 1, "topk_method": "group_limited_greedy"},
    ),
    "deepseek-v2-lite": lambda: transformers.DeepseekV2Config(
        **LATENT | {"q_lora_rank": None}, **ROUTED | {"n_group": 1, "topk_group": 1}
    ),
    "deepseek-v3": lambda: transformers.DeepseekV3Config(
        **LATENT | {"rope_parameters": YARN | MSCALE},
        **ROUTED | {"n_group": 2, "topk_group": 1, "norm_topk_prob": True},
    ),
    "deepseek-v3.2": lambda: transformers.DeepseekV32Config(
        **LATENT | INDEXED | {"rope_parameters": YARN | MSCALE},
        **ROUTED | {"n_group": 2, "topk_group": 1, "norm_topk_prob": True},
    ),
    "glm4-moe-lite": lambda: transformers.Glm4MoeLiteConfig(
        **LATENT, **ROUTED | {"n_group": 1, "topk_group": 1, "num_nextn_predict_layers": 1}
    ),
    "glm5": lambda: transformers.GlmMoeDsaConfig(
        **LATENT | INDEXED, **ROUTED | {"n_group": 1, "topk_group": 1}
    ),
    "minicpm3": lambda: transformers.MiniCPM3Config(
        **LATENT | {"hidden_size": 256, "v_head_dim": 128, "tie_word_embeddings": True},
        **{"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256},
    ),
    "ernie4.5": lambda: transformers.Ernie4_5Config(**HEADS_OF_32),
    "exaone4-with-windows": lambda: transformers.Exaone4Config(**TIED, **WINDOWS),
    "exaone4": lambda: transformers.Exaone4Config(
        **TIED, sliding_window=None, layer_types=["full_attention"] * 2
    ),
    "gemma": lambda: transformers.GemmaConfig(**HEADS_OF_32),
    "gemma2": lambda: transformers.Gemma2Config(
        **HEADS_OF_32,
        sliding_window=WINDOW,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=8.0,
        query_pre_attn_scalar=32,
    ),
    "gemma3-with-a-tower": lambda: transformers.Gemma3Config(
        text_config=TIED
        | {
            **{"num_hidden_layers": 6, "intermediate_size": 16, "head_dim": 16},
            **{"sliding_window": WINDOW, "query_pre_attn_scalar": 16, "pad_token_id": 0},
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
        vision_config=VISION | {"intermediate_size": 32, "image_size": 28, "patch_size": 14},
    ),
    "gemma4": lambda: transformers.Gemma4TextConfig(**GEMMA4),
    "gemma4-with-experts": lambda: transformers.Gemma4TextConfig(
        **GEMMA4
        | {
            **{"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]},
            **{"num_kv_shared_layers": 0, "use_double_wide_mlp": False},
            **{"hidden_size_per_layer_input": 0, "enable_moe_block": True},
            **{"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16},
        }
    ),
    "gemma4-with-a-tower": lambda: transformers.Gemma4Config(
        text_config=GEMMA4
        | {
            **{"num_key_value_heads": 2, "num_global_key_value_heads": 1},
            **{"attention_k_eq_v": True, "num_kv_shared_layers": 0},
            **{"use_double_wide_mlp": False, "hidden_size_per_layer_input": 0},
        },
        vision_config=VISION | {"intermediate_size": 32, "head_dim": 16, "num_key_value_heads": 2},
    ),
    "ernie4.5-moe": lambda: transformers.Ernie4_5_MoeConfig(
        **HEADS_OF_32,
        **{"moe_intermediate_size": 16, "moe_k": 2, "moe_num_experts": 4},
        moe_num_shared_experts=2,
    ),
    "glm4-moe": lambda: transformers.Glm4MoeConfig(
        **SHAPE | {"head_dim": 32, "pad_token_id": 0},
        **{"moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2},
        **{"n_group": 1, "topk_group": 1, "n_shared_experts": 2, "routed_scaling_factor": 1.5},
        **{"use_qk_norm": True, "attention_bias": True, "num_nextn_predict_layers": 1},
    ),
    "glm4": lambda: transformers.Glm4Config(**SHAPE | {"head_dim": 32, "pad_token_id": 0}),
    "gpt-neox": lambda: transformers.GPTNeoXConfig(**SHAPE, rotary_pct=0.5),
    "gpt-neox-one-after-the-other": lambda: transformers.GPTNeoXConfig(
        **SHAPE, use_parallel_residual=False
    ),
    "gpt2": lambda: transformers.GPT2Config(
        **{"vocab_size": len(TOKENS), "n_embd": 32, "n_layer": 2, "n_head": 2},
        **{"n_positions": 128, "bos_token_id": 0, "eos_token_id": 1},
    ),
    "gpt-oss": lambda: transformers.GptOssConfig(
        **HEADS_OF_32 | {"pad_token_id": 0, "tie_word_embeddings": False},
        **{"num_local_experts": 4, "num_experts_per_tok": 2},
        **WINDOWS,
        rope_parameters=YARN | {"truncate": False},
    ),
    "granite-moe": lambda: transformers.GraniteMoeConfig(
        **SHAPE | {"intermediate_size": 16},
        **{"num_local_experts": 4, "num_experts_per_tok": 2},
        **{"embedding_multiplier": 12.0, "logits_scaling": 8.0},
        **{"residual_multiplier": 0.22, "attention_multiplier": 0.05},
    ),
    "hy3": lambda: transformers.HYV3Config(**HEADS_OF_32, **EXPERTS, num_shared_experts=1),
    "minimax-m2": lambda: transformers.MiniMaxM2Config(
        **HEADS_OF_32 | {"tie_word_embeddings": False, "intermediate_size": 16},
        **{"num_local_experts": 4, "num_experts_per_tok": 2, "rotary_dim": 16},
        rope_parameters={"rope_theta": 5e6, "rope_type": "default", "partial_rotary_factor": 0.5},
    ),
    "granite": lambda: transformers.GraniteConfig(
        **SHAPE,
        **{"embedding_multiplier": 12.0, "logits_scaling": 8.0},
        **{"residual_multiplier": 0.22, "attention_multiplier": 0.05},
    ),
    "internlm3": lambda: transformers.LlamaConfig(**SHAPE, head_dim=16),
    "falcon-h1": lambda: transformers.FalconH1Config(**FALCON_H1),
    "falcon-h1-with-norms": lambda: transformers.FalconH1Config(
        **FALCON_H1, mamba_rms_norm=True, mamba_norm_before_gate=False
    ),
    "granite-hybrid": lambda: transformers.GraniteMoeHybridConfig(
        **GRANITE_HYBRID | {"intermediate_size": 16},
        **{"num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "granite-hybrid-without-experts": lambda: transformers.GraniteMoeHybridConfig(
        **GRANITE_HYBRID, num_local_experts=0, num_experts_per_tok=0
    ),
    "lfm2": lambda: transformers.Lfm2Config(
        **TIED, layer_types=["conv", FULL], block_multiple_of=16
    ),
    "lfm2-moe": lambda: transformers.Lfm2MoeConfig(
        **TIED | {"num_hidden_layers": 3},
        **EXPERTS,
        **{"layer_types": ["conv", FULL, "conv"], "num_dense_layers": 1},
    ),
    "nemotron-h": lambda: transformers.NemotronHConfig(
        **NEMOTRON_H, layers_block_type=[MAMBA, "mlp", FULL, "mlp", MAMBA]
    ),
    "nemotron3": lambda: transformers.NemotronHConfig(
        **NEMOTRON_H | {"intermediate_size": 16},
        layers_block_type=[MAMBA, "moe", MAMBA, FULL, "moe"],
        **{"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
        **{"moe_shared_expert_intermediate_size": 32, "routed_scaling_factor": 1.5},
    ),
    "llama": lambda: transformers.LlamaConfig(**SHAPE, attention_bias=True),
    "llama-with-linear-rope": lambda: transformers.LlamaConfig(
        **SHAPE, rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}
    ),
    "llama3": lambda: transformers.LlamaConfig(**TIED, rope_parameters=LLAMA3),
    "ministral3": lambda: transformers.Ministral3Config(
        **HEADS_OF_32,
        rope_parameters=YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1},
    ),
    "mistral": lambda: transformers.MistralConfig(**HEADS_OF_32, sliding_window=None),
    "mistral3": lambda: transformers.Mistral3Config(
        text_config=transformers.MistralConfig(**HEADS_OF_32, sliding_window=None),
        vision_config=VISION
        | {"model_type": "pixtral", "intermediate_size": 32, "image_size": 28, "patch_size": 14},
    ),
    "mixtral": lambda: transformers.MixtralConfig(
        **SHAPE | {"intermediate_size": 16}, num_local_experts=4, num_experts_per_tok=2
    ),
    "olmo2": lambda: transformers.Olmo2Config(**SHAPE | {"pad_token_id": 0}),
    "olmo3": lambda: transformers.Olmo3Config(
        **SHAPE | {"pad_token_id": 0},
        **WINDOWS,
        rope_parameters={
            "full_attention": YARN,
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    "olmoe": lambda: transformers.OlmoeConfig(
        **SHAPE | {"pad_token_id": 0, "num_key_value_heads": 2, "intermediate_size": 16},
        **{"num_experts": 4, "num_experts_per_tok": 2},
    ),
    "phi3": lambda: transformers.Phi3Config(**SHAPE | {"pad_token_id": 0}, sliding_window=None),
    "phi4-mini": lambda: transformers.Phi3Config(
        **SHAPE | {"pad_token_id": 0, "max_position_embeddings": 512},
        partial_rotary_factor=0.5,
        original_max_position_embeddings=64,
        rope_parameters=LONG,
    ),
    "qwen2": lambda: transformers.Qwen2Config(**TIED),
    "qwen2-moe": lambda: transformers.Qwen2MoeConfig(
        **SHAPE, **EXPERTS, shared_expert_intermediate_size=32
    ),
    "qwen2.5-vl": lambda: transformers.Qwen2_5_VLConfig(
        text_config=TIED | {"rope_parameters": {"rope_theta": 1e4, "mrope_section": [4, 2, 2]}},
        vision_config={"depth": 1, "hidden_size": 32, "num_heads": 2, "out_hidden_size": 32},
    ),
    "qwen3": lambda: transformers.Qwen3Config(**HEADS_OF_32, rope_parameters=YARN),
    "qwen3-moe": lambda: transformers.Qwen3MoeConfig(**TIED, **EXPERTS, norm_topk_prob=True),
    "qwen3-next": lambda: transformers.Qwen3NextConfig(
        **DELTA | {"intermediate_size": 16}, **EXPERTS, shared_expert_intermediate_size=32
    ),
    "qwen3.5": lambda: transformers.Qwen3_5TextConfig(**DELTA),
    "qwen3.5-moe": lambda: transformers.Qwen3_5MoeTextConfig(
        **DELTA, **EXPERTS, shared_expert_intermediate_size=32
    ),
    "qwen3-vl": lambda: transformers.Qwen3VLConfig(
        text_config=HEADS_OF_32
        | {"rope_parameters": {"rope_theta": 1e4, "mrope_section": [6, 5, 5]}},
        vision_config={
            **{"depth": 1, "hidden_size": 32, "num_heads": 2, "out_hidden_size": 32},
            "deepstack_visual_indexes": [0],
        },
    ),
    "seed-oss": lambda: transformers.SeedOssConfig(**HEADS_OF_32),
    "smollm3": lambda: transformers.SmolLM3Config(
        **TIED | {"num_hidden_layers": 4, "pad_token_id": 0, "intermediate_size": 16}
    ),
    "starcoder2": lambda: transformers.Starcoder2Config(**TIED, sliding_window=None),
}
SEEDS = {"mixtral": 1, "qwen3-next": 1}
"""Seeds of models whose routers are not undecided about a token of the prompt with others."""
PUBLISHED = {
    **{key: {"scoring_func": "sigmoid"} for key in ("deepseek-v3", "deepseek-v3.2")},
    "cohere2": {"rotary_pct": 1.0},
    "gpt-neox": {"rotary_pct": 0.5},
    "gpt-neox-one-after-the-other": {"rotary_pct": 0.25},
    "gpt2": {"n_ctx": 128},
    "granite-hybrid": {"layer_types": ["mamba", "attention"]},
    "granite-hybrid-without-experts": {"layer_types": ["mamba", "attention"]},
    "nemotron-h": {
        "hybrid_override_pattern": "M-*-M",
        "num_hidden_layers": 5,
        "layers_block_type": None,
        "num_experts_per_tok": None,
        "n_routed_experts": None,
        "n_group": None,
        "topk_group": None,
    },
    "nemotron3": {
        "hybrid_override_pattern": "MEM*E",
        "num_hidden_layers": 5,
        "layers_block_type": None,
    },
    "internlm3": {"architectures": ["InternLM3ForCausalLM"], "model_type": "internlm3"},
}
"""Fields of published configs that the converter reads and transformers no longer writes; None:
those that it writes and published ones have not."""
OTHERWISE_BY_LLAMA_CPP = {
    "deepseek-v3.2": "yarn scales an indexer otherwise",
    "glm4-moe-lite": "its router's scores are softmax but in the published size",
    "deepseek-v2-lite": "models of 27 layers alone have queries of full rank",
    "exaone4-with-windows": "windows count in models of 64 layers alone",
    "gpt-oss": "yarn's bounds are whole pairs",
    "minimax-m2": "models of this size are not read",
    "phi3": "windows do not count",
}
"""What llama.cpp does not compute as transformers does."""
DRAFTING = "model.layers.1."
"""Layer that stands for the one that drafts, which transformers does not write."""


def as_published(config: Mapping[str, Any], family: str) -> dict[str, Any]:
    """A config that transformers wrote with the fields of the family's published ones."""
    published = PUBLISHED.get(family, {})
    absent = {name for name, value in published.items() if value is None}
    return {name: value for name, value in {**config, **published}.items() if name not in absent}


def random_model(family: str) -> Any:
    """A model whose weights are numbers of float16, few of them different: its file compresses."""
    config = FAMILIES[family]()
    written_out: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "eager"}
    is_causal = type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    auto = transformers.AutoModelForCausalLM
    if not is_causal or hasattr(config, "vision_config"):
        auto = transformers.AutoModelForImageTextToText
    model = auto.from_config(config, **written_out).eval()
    torch.manual_seed(SEEDS.get(family, 0))
    with torch.no_grad():
        for parameter in model.parameters():
            sixteenths = torch.randint(-8, 9, parameter.shape) / 16
            parameter.copy_(sixteenths + (1.0 if parameter.dim() == 1 else 0.0))
        for name, buffer in model.named_buffers():
            if name.endswith(("layer_scalar", "correction_bias")):
                sixteenths = torch.randint(-4, 5, buffer.shape) / 16
                buffer.copy_(sixteenths + ("scalar" in name))
    return model


def drafting_layer(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A layer for multi-token prediction behind the last one, of a checkpoint of two layers."""
    spare = "model.layers.2."
    copied = {
        name.replace(DRAFTING, spare): tensor.clone()
        for name, tensor in tensors.items()
        if name.startswith(DRAFTING)
    }
    norm = tensors[DRAFTING + "input_layernorm.weight"]
    names = ("enorm", "hnorm", "shared_head.norm")
    copied |= {f"{spare}{name}.weight": norm.clone() for name in names}
    return copied | {f"{spare}eh_proj.weight": torch.ones(len(norm), 2 * len(norm))}


def pack_experts(model: Any) -> dict[str, torch.Tensor]:
    """Gives experts of gpt-oss numbers of MXFP4, and returns the model's tensors with these packed,
    as they are published."""
    tensors = dict(model.state_dict())
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "experts.down_proj"))]:
        own = tensors.pop(name)
        num_experts, num_inputs, num_outputs = own.shape
        shape = num_experts, num_outputs, num_inputs // 32
        blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8)
        scales = torch.randint(122, 125, shape, dtype=torch.uint8)
        own.copy_(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    return tensors
