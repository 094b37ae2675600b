"""Small random checkpoints of every family, as transformers writes them, and an engine that answers
from a folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from headwater.engine_core.config import EngineConfig
from headwater.engine_core.engine import Engine
from headwater.engine_core.executor import releasable_of
from headwater.engine_core.executors.build.single import build_executor
from headwater.engine_core.kv.block_record import BlockSeal
from headwater.engine_core.kv.tiers import key_of, open_disk
from headwater.engine_core.models import conversion
from headwater.engine_core.options import ExecutorOptions
from headwater.engine_core.request import Holder, NewRequest, TokenLogprobs
from headwater.engine_core.sampling_params import SamplingParams
from headwater.engine_core.scheduling.speculation.speculator import Speculator
from headwater.engine_core.step_output import StepOutput
from headwater.engine_core.waits_for import WaitsFor
from headwater.engine_core.weights.formats.gguf_file import GgufFile
from headwater.kernels.quant.block_formats import BlockWeight, expand
from tests.engine_core.direct_link import DirectLink

SHAPE = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
GEMMA3 = SHAPE | {
    "num_hidden_layers": 6,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "sliding_window": 40,
    "tie_word_embeddings": True,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
}
GEMMA4 = SHAPE | {
    "num_hidden_layers": 9,
    "layer_types": 3 * (2 * ["sliding_attention"] + ["full_attention"]),
    "head_dim": 32,
    "global_head_dim": 64,
    "sliding_window": 40,
    "num_kv_shared_layers": 3,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": 512,
    "final_logit_softcapping": 8.0,
    "tie_word_embeddings": True,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 256,
}
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0 + i / 10 for i in range(8)],
    "long_factor": [2.0 + i for i in range(8)],
}
VISION = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
QWEN35_VISION = {
    "depth": 1,
    "hidden_size": 32,
    "num_heads": 2,
    "out_hidden_size": 64,
    "intermediate_size": 32,
}
HEADS_OF_32 = SHAPE | {"head_dim": 32}
LLAMA4 = HEADS_OF_32 | {
    "intermediate_size_mlp": 96,
    "num_local_experts": 8,
    "interleave_moe_layer_step": 2,
    "no_rope_layer_interval": 3,
    "floor_scale": 16,
    "attn_scale": 0.5,
    "attention_chunk_size": 40,
}
EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
}
SHARED_EXPERTS = EXPERTS | {"shared_expert_intermediate_size": 64}
STATES = SHAPE | {
    "num_hidden_layers": 4,
    "head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
}
GRANITE4 = SHAPE | {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_d_state": 32,
    "shared_intermediate_size": 96,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "embedding_multiplier": 12.0,
    "logits_scaling": 8.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.05,
}
LATENT = SHAPE | {
    "num_key_value_heads": 4,
    "q_lora_rank": 48,
    "kv_lora_rank": 48,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
}
DEEPSEEK = LATENT | {
    "pad_token_id": 0,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 4.0,
        "original_max_position_embeddings": 256,
        "mscale": 0.7,
        "mscale_all_dim": 1.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
    },
}
INDEX = {"index_n_heads": 16, "index_head_dim": 32, "index_topk": 40}
"""Sparse indexers, whose choice leaves out some tokens of prompts in these tests."""
MAMBA = "linear_attention"
FULL = "full_attention"
NEMOTRON = {name: value for name, value in SHAPE.items() if name != "num_hidden_layers"} | {
    "head_dim": 32,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "ssm_state_size": 32,
    "n_groups": 2,
    "chunk_size": 16,
    # Its modelling code bounds steps of prompts alone by this number.
    "time_step_min": 1e-30,
}
FALCON_H1 = SHAPE | {
    "mamba_d_ssm": 64,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 32,
    "mamba_chunk_size": 16,
    "embedding_multiplier": 5.0,
    "lm_head_multiplier": 0.125,
    "mlp_multipliers": [0.75, 0.5],
    "key_multiplier": 0.375,
    "attention_in_multiplier": 1.25,
    "attention_out_multiplier": 0.8,
    "ssm_in_multiplier": 1.5,
    "ssm_out_multiplier": 0.3,
    "ssm_multipliers": [0.9, 0.6, 0.4, 0.7, 0.8],
}
WINDOWS = {"sliding_window": 40, "layer_types": ["full_attention"] + ["sliding_attention"] * 2}


def _vision_models() -> dict[str, Any]:
    """Configs of models that read images, whose text part is served."""
    return {
        "gemma4 with a tower": lambda: transformers.Gemma4Config(
            text_config=GEMMA4,
            vision_config=VISION
            | {"intermediate_size": 32, "head_dim": 16, "num_key_value_heads": 2},
        ),
        "gemma3 with a tower": lambda: transformers.Gemma3Config(
            text_config=GEMMA3,
            vision_config=VISION | {"intermediate_size": 32, "image_size": 28, "patch_size": 14},
        ),
        "qwen2.5-vl": lambda: transformers.Qwen2_5_VLConfig(
            text_config=SHAPE
            | {"rope_parameters": {"rope_theta": 1e4, "mrope_section": [4, 2, 2]}},
            vision_config={"depth": 1, "hidden_size": 32, "num_heads": 2, "out_hidden_size": 64},
        ),
        "qwen3-vl": lambda: transformers.Qwen3VLConfig(
            text_config=HEADS_OF_32
            | {"rope_parameters": {"rope_theta": 1e4, "mrope_section": [6, 5, 5]}},
            vision_config={
                "depth": 1,
                "hidden_size": 32,
                "num_heads": 2,
                "out_hidden_size": 64,
                "deepstack_visual_indexes": [0],
            },
        ),
        "qwen3.5 with a tower": lambda: transformers.Qwen3_5Config(
            text_config=STATES, vision_config=QWEN35_VISION
        ),
        "qwen3.5-moe with a tower": lambda: transformers.Qwen3_5MoeConfig(
            text_config=STATES | SHARED_EXPERTS, vision_config=QWEN35_VISION
        ),
        "kimi-k2.5 with a tower": lambda: transformers.Kimi_K25Config(
            text_config=DEEPSEEK | {"model_type": "kimi_k2", "num_nextn_predict_layers": 0},
            vision_config=VISION | {"intermediate_size": 32},
            projection_hidden_size=32,
            tie_word_embeddings=False,
        ),
        "llama4 with a tower": lambda: transformers.Llama4Config(
            text_config=LLAMA4,
            vision_config=VISION
            | {
                "intermediate_size": 128,
                "image_size": 28,
                "patch_size": 14,
                "vision_output_dim": 32,
                "projector_input_dim": 32,
                "projector_output_dim": 32,
            },
        ),
        "mistral3 with a tower": lambda: transformers.Mistral3Config(
            text_config=transformers.MistralConfig(**HEADS_OF_32, sliding_window=None),
            vision_config={
                "model_type": "pixtral",
                "intermediate_size": 32,
                "image_size": 28,
                "patch_size": 14,
                **VISION,
            },
        ),
    }


FAMILIES: dict[str, Any] = {
    "llama2": lambda: transformers.LlamaConfig(**SHAPE | {"num_key_value_heads": 4}),
    "llama3 with scaled rope": lambda: transformers.LlamaConfig(
        **SHAPE, rope_parameters=LLAMA3_ROPE
    ),
    "llama with linear rope": lambda: transformers.LlamaConfig(
        **SHAPE, rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}
    ),
    "llama with biases": lambda: transformers.LlamaConfig(
        **SHAPE, attention_bias=True, mlp_bias=True, hidden_act="gelu"
    ),
    "smollm2": lambda: transformers.LlamaConfig(**SHAPE | {"tie_word_embeddings": True}),
    "qwen2": lambda: transformers.Qwen2Config(**SHAPE),
    "qwen2 with windows": lambda: transformers.Qwen2Config(
        **SHAPE, use_sliding_window=True, sliding_window=40, max_window_layers=1
    ),
    "qwen3": lambda: transformers.Qwen3Config(**SHAPE, head_dim=32),
    "qwen3 with yarn": lambda: transformers.Qwen3Config(
        **SHAPE, head_dim=32, rope_parameters=YARN_ROPE, attention_bias=True
    ),
    "mistral": lambda: transformers.MistralConfig(**SHAPE, sliding_window=None),
    "mistral with a window": lambda: transformers.MistralConfig(**SHAPE, sliding_window=40),
    "ministral": lambda: transformers.MinistralConfig(**HEADS_OF_32, **WINDOWS),
    "ministral3": lambda: transformers.Ministral3Config(
        **HEADS_OF_32,
        rope_parameters=YARN_ROPE
        | {"original_max_position_embeddings": 100, "llama_4_scaling_beta": 0.1},
    ),
    "gemma": lambda: transformers.GemmaConfig(
        **HEADS_OF_32 | {"num_key_value_heads": 1, "tie_word_embeddings": True}
    ),
    "gemma2": lambda: transformers.Gemma2Config(
        **HEADS_OF_32 | {"tie_word_embeddings": True},
        sliding_window=40,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=8.0,
        query_pre_attn_scalar=20,
    ),
    "gemma3": lambda: transformers.Gemma3TextConfig(**GEMMA3),
    "gemma3 whose last layer has a window": lambda: transformers.Gemma3TextConfig(
        **GEMMA3
        | {"num_hidden_layers": 3, "sliding_window_pattern": 2, "query_pre_attn_scalar": 168}
    ),
    "gemma4": lambda: transformers.Gemma4TextConfig(**GEMMA4),
    "gemma4 with experts": lambda: transformers.Gemma4TextConfig(
        **GEMMA4,
        enable_moe_block=True,
        num_experts=8,
        top_k_experts=3,
        moe_intermediate_size=32,
    ),
    "gemma4 whose keys are values": lambda: transformers.Gemma4TextConfig(
        **GEMMA4
        | {
            "num_key_value_heads": 4,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "num_kv_shared_layers": 0,
            "use_double_wide_mlp": False,
            "hidden_size_per_layer_input": 0,
        }
    ),
    "phi3": lambda: transformers.Phi3Config(**SHAPE, pad_token_id=0, sliding_window=40),
    "phi4-mini": lambda: transformers.Phi3Config(
        **HEADS_OF_32 | {"hidden_size": 128},
        pad_token_id=0,
        partial_rotary_factor=0.5,
        original_max_position_embeddings=1024,
        rope_parameters=LONG_ROPE,
    ),
    "smollm3": lambda: transformers.SmolLM3Config(
        **SHAPE, pad_token_id=0, no_rope_layers=[1, 0, 1]
    ),
    "olmo2": lambda: transformers.Olmo2Config(**SHAPE, pad_token_id=0),
    "olmo3": lambda: transformers.Olmo3Config(
        **SHAPE,
        pad_token_id=0,
        **WINDOWS,
        rope_parameters={
            "full_attention": YARN_ROPE,
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    "granite": lambda: transformers.GraniteConfig(
        **SHAPE,
        embedding_multiplier=12.0,
        logits_scaling=8.0,
        residual_multiplier=0.22,
        attention_multiplier=0.05,
    ),
    "glm4": lambda: transformers.Glm4Config(**HEADS_OF_32, pad_token_id=0),
    "exaone4": lambda: transformers.Exaone4Config(**HEADS_OF_32, **WINDOWS),
    "exaone4 without windows": lambda: transformers.Exaone4Config(
        **HEADS_OF_32, sliding_window=None, layer_types=["full_attention"] * 3
    ),
    "cohere2": lambda: transformers.Cohere2Config(
        **SHAPE | {"tie_word_embeddings": True}, **WINDOWS, logit_scale=0.5
    ),
    "seed-oss": lambda: transformers.SeedOssConfig(**HEADS_OF_32),
    "ernie4.5": lambda: transformers.Ernie4_5Config(**HEADS_OF_32),
    "internlm3": lambda: transformers.InternLM3Config(
        **HEADS_OF_32, attention_bias=True, mlp_bias=True
    ),
    "starcoder2": lambda: transformers.Starcoder2Config(**SHAPE, sliding_window=40),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=512, n_embd=64, n_layer=3, n_head=4, n_positions=1024
    ),
    "gpt-neox": lambda: transformers.GPTNeoXConfig(**SHAPE, rotary_pct=0.5),
    "gpt-neox one after the other": lambda: transformers.GPTNeoXConfig(
        **SHAPE, use_parallel_residual=False
    ),
    "opt": lambda: transformers.OPTConfig(
        **SHAPE, ffn_dim=128, word_embed_proj_dim=64, pad_token_id=0
    ),
    "qwen3-moe": lambda: transformers.Qwen3MoeConfig(**SHAPE, **EXPERTS, norm_topk_prob=True),
    "qwen3-moe with dense layers": lambda: transformers.Qwen3MoeConfig(
        **SHAPE, **EXPERTS, decoder_sparse_step=2
    ),
    "qwen2-moe": lambda: transformers.Qwen2MoeConfig(
        **SHAPE, **EXPERTS, shared_expert_intermediate_size=96
    ),
    "mixtral": lambda: transformers.MixtralConfig(
        **SHAPE, num_local_experts=4, num_experts_per_tok=2
    ),
    "olmoe": lambda: transformers.OlmoeConfig(
        **SHAPE, pad_token_id=0, num_experts=8, num_experts_per_tok=3
    ),
    "gpt-oss": lambda: transformers.GptOssConfig(
        **HEADS_OF_32,
        pad_token_id=0,
        num_local_experts=8,
        num_experts_per_tok=3,
        sliding_window=40,
        layer_types=WINDOWS["layer_types"],
        rope_parameters=YARN_ROPE | {"truncate": False},
    ),
    "llama4": lambda: transformers.Llama4TextConfig(**LLAMA4),
    "granite-moe": lambda: transformers.GraniteMoeConfig(
        **SHAPE,
        num_local_experts=8,
        num_experts_per_tok=3,
        embedding_multiplier=12.0,
        logits_scaling=8.0,
        residual_multiplier=0.22,
        attention_multiplier=0.05,
    ),
    "deepseek-v2": lambda: transformers.DeepseekV2Config(
        **DEEPSEEK, topk_method="group_limited_greedy", norm_topk_prob=False
    ),
    "deepseek-v2-lite": lambda: transformers.DeepseekV2Config(
        **DEEPSEEK | {"q_lora_rank": None, "n_group": 1, "topk_group": 1}
    ),
    "deepseek-v3": lambda: transformers.DeepseekV3Config(**DEEPSEEK, num_nextn_predict_layers=0),
    "deepseek-v3.2": lambda: transformers.DeepseekV32Config(**DEEPSEEK | INDEX),
    "glm-5": lambda: transformers.GlmMoeDsaConfig(
        **DEEPSEEK
        | INDEX
        | {"n_group": 1, "topk_group": 1}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    ),
    "glm-5.2": lambda: transformers.GlmMoeDsaConfig(
        **DEEPSEEK
        | INDEX
        | {"n_group": 1, "topk_group": 1, "indexer_types": ["full", "shared", "shared"]}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    ),
    "glm4-moe-lite": lambda: transformers.Glm4MoeLiteConfig(
        **DEEPSEEK | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        num_nextn_predict_layers=0,
    ),
    "minicpm3": lambda: transformers.MiniCPM3Config(
        **LATENT, scale_emb=6, scale_depth=1.4, dim_model_base=32
    ),
    "glm4-moe": lambda: transformers.Glm4MoeConfig(
        **HEADS_OF_32,
        pad_token_id=0,
        moe_intermediate_size=32,
        n_routed_experts=8,
        num_experts_per_tok=3,
        n_group=4,
        topk_group=2,
        n_shared_experts=2,
        routed_scaling_factor=1.5,
        use_qk_norm=True,
        attention_bias=True,
        num_nextn_predict_layers=0,
    ),
    "mimo-v2-flash": lambda: transformers.MiMoV2FlashConfig(
        **SHAPE
        | {"num_hidden_layers": 7, "num_attention_heads": 8, "num_key_value_heads": 2}
        | {"head_dim": 48, "v_head_dim": 32, "sliding_window": 41, "moe_intermediate_size": 32}
        | {"n_routed_experts": 8, "num_experts_per_tok": 3},
    ),
    "minimax-m2": lambda: transformers.MiniMaxM2Config(
        **HEADS_OF_32,
        num_local_experts=8,
        num_experts_per_tok=3,
        # Published files have the first field, which some releases of transformers pass over.
        rotary_dim=16,
        rope_parameters={"rope_theta": 5e6, "rope_type": "default", "partial_rotary_factor": 0.5},
    ),
    "hy3": lambda: transformers.HYV3Config(**HEADS_OF_32, **EXPERTS, num_shared_experts=1),
    "ernie4.5-moe": lambda: transformers.Ernie4_5_MoeConfig(
        **HEADS_OF_32,
        moe_intermediate_size=32,
        moe_k=3,
        moe_num_experts=8,
        moe_num_shared_experts=2,
    ),
    "qwen3-next": lambda: transformers.Qwen3NextConfig(**STATES, **SHARED_EXPERTS),
    "qwen3.5": lambda: transformers.Qwen3_5TextConfig(**STATES),
    "qwen3.5-moe": lambda: transformers.Qwen3_5MoeTextConfig(**STATES, **SHARED_EXPERTS),
    "granite4-hybrid": lambda: transformers.GraniteMoeHybridConfig(**GRANITE4),
    "granite4-hybrid without experts": lambda: transformers.GraniteMoeHybridConfig(
        **GRANITE4 | {"num_local_experts": 0, "position_embedding_type": "rope"}
    ),
    "falcon-h1": lambda: transformers.FalconH1Config(**FALCON_H1),
    "falcon-h1 with norms": lambda: transformers.FalconH1Config(
        **FALCON_H1, mamba_rms_norm=True, mamba_norm_before_gate=False, mamba_n_groups=2
    ),
    # Heads of Nemotron Nano 2.
    "nemotron-h": lambda: transformers.NemotronHConfig(
        **NEMOTRON | {"mamba_head_dim": 80},
        layers_block_type=[MAMBA, "mlp", MAMBA, FULL, "mlp", MAMBA],
    ),
    "nemotron3": lambda: transformers.NemotronHConfig(
        **NEMOTRON,
        layers_block_type=[MAMBA, "moe", MAMBA, FULL, "moe", MAMBA, "mlp"],
        n_routed_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=32,
        moe_shared_expert_intermediate_size=64,
        routed_scaling_factor=2.5,
        n_group=4,
        topk_group=2,
    ),
    "lfm2": lambda: transformers.Lfm2Config(
        **SHAPE
        | {"tie_word_embeddings": True, "num_hidden_layers": 4, "block_multiple_of": 32}
        | {"layer_types": ["conv", "conv", "full_attention", "conv"]}
    ),
    "lfm2-moe": lambda: transformers.Lfm2MoeConfig(
        **SHAPE
        | {"tie_word_embeddings": True, "num_hidden_layers": 4, "num_dense_layers": 1}
        | {"layer_types": ["conv", "conv", "full_attention", "conv"]}
        | EXPERTS
    ),
    **_vision_models(),
}

WITH_STATES = tuple(
    family
    for family in FAMILIES
    if family.startswith(("qwen3-next", "qwen3.5", "lfm2", "granite4", "nemotron", "falcon-h1"))
)
"""Families whose layers keep states."""


def random_checkpoint(
    family: str, folder: Path, *, max_shard_size: str = "5GB", **sizes: Any
) -> Any:
    """Writes one in Hugging Face's layout; returns the transformers model. Norms and biases are
    random too. `sizes` are fields of its config."""
    torch.manual_seed(0)
    config = FAMILIES[family]()
    config.update(sizes)
    # Another attention passes over caps of scores in some releases of transformers.
    written_out: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "eager"}
    model = _class_of(config).from_config(config, **written_out).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(
                torch.randn_like(parameter) * 0.3 + (1.0 if parameter.dim() == 1 else 0.0)
            )
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                # States of published models remember hundreds of tokens.
                parameter.sub_(5)
        for name, buffer in model.named_buffers():
            if name.endswith(("correction_bias", "layer_scalar")):
                buffer.copy_(torch.randn_like(buffer) * 0.3 + ("scalar" in name))
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return model


def without_indexers(source: Path, folder: Path) -> None:
    """Writes a checkpoint of "deepseek-v3.2" as one of DeepSeek V3, whose layers have no
    indexers."""
    shutil.copytree(source, folder)
    path = folder / "model.safetensors"
    save_file({name: x for name, x in load_file(path).items() if ".indexer." not in name}, path)
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}
    (folder / "config.json").write_text(json.dumps(config))


def _class_of(config: Any) -> Any:
    is_causal = type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    # Some models that read images have a class for their text part alone.
    is_causal = is_causal and not hasattr(config, "vision_config")
    return (
        transformers.AutoModelForCausalLM if is_causal else transformers.AutoModelForImageTextToText
    )


def architecture_of(config: Any) -> str:
    """The name of the model that transformers makes of a config."""
    return str(_class_of(config)._model_mapping[type(config)].__name__)


def convert(source: Path, folder: Path, dtype: str = "float32", **more: Any) -> Path:
    folder.mkdir(exist_ok=True)
    conversion.convert(source, folder, dtype=dtype, progress=lambda done, total: None, **more)
    return folder


def expanded(file: GgufFile) -> dict[str, torch.Tensor]:
    """All of a file's weights in float32."""
    tensors = file.tensors()
    return {
        name: expand(each, torch.float32) if isinstance(each, BlockWeight) else each
        for name, each in tensors
    }


@dataclass(slots=True)
class Answer:
    """What one request was told."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs]
    prompt_logprobs: list[TokenLogprobs]
    cached_tokens: int = 0


class SmallEngine:
    """An engine in this process."""

    def __init__(
        self,
        folder: Path,
        *,
        link: DirectLink | None = None,
        address: str = "",
        speculate: Callable[[EngineConfig], Speculator] | None = None,
        **options: Any,
    ) -> None:
        """`link` joins it, as `address`, with other engines of this process; `speculate` makes what
        drafts for it."""
        given = {
            "num_threads": 1,
            "num_blocks": 600,
            "max_num_batched_tokens": 256,
            "max_num_seqs": 64,
        } | options
        asked = ExecutorOptions(model_folder=folder, **given)
        self.executor, self.config, facts = build_executor(asked, lambda phase, done, total: None)
        self.numerics_id = facts.numerics_id
        disk_files = open_disk(asked, self.config, facts, self.executor, BlockSeal())
        self._link = link
        peer_link = None
        if link is not None:
            key = key_of(asked, self.config, facts, self.executor)
            peer_link = link.end_of(address, key, self.config, self.executor)
        speculator = None if speculate is None else speculate(self.config)
        self.engine = Engine(
            self.config,
            self.executor,
            speculator=speculator,
            disk_files=disk_files,
            peer_link=peer_link,
            memory=releasable_of(self.executor),
        )
        if link is not None:
            link.join(address, self.engine)
        self._num_asked = 0

    def answer(
        self,
        prompts: Sequence[Sequence[int]],
        *samplings: SamplingParams,
        holder: Holder | None = None,
        begun: Sequence[Sequence[int]] = (),
        **fields: Any,
    ) -> list[Answer]:
        """All prompts at once; one sampling for all, or one each. `begun`: what was already
        answered to each, which an answer goes on after. `fields`: others of each request."""
        first = self._num_asked
        answers = {}
        self._num_asked += len(prompts)
        for i, prompt in enumerate(prompts):
            sampling = samplings[i if len(samplings) > 1 else 0]
            answers[first + i] = Answer([], [], [])
            new = NewRequest(
                key=first + i,
                prompt_ids=list(prompt),
                output_ids=list(begun[i]) if begun else [],
                sampling=sampling,
                holder=holder,
                **fields,
            )
            self.engine.add(new)
        while self.engine.has_work():
            if self._link is not None:
                self._link.pump()
            if (output := self.engine.step()) is not None:
                receive(output, answers)
        return [answers[first + i] for i in range(len(prompts))]

    def tokens(
        self, prompts: Sequence[Sequence[int]], *samplings: SamplingParams
    ) -> list[list[int]]:
        return [answer.token_ids for answer in self.answer(prompts, *samplings)]

    def settle(self) -> None:
        """Returns when nothing is on its way to a disk or being looked for there."""
        while self.engine.waits_for is WaitsFor.TIME:
            self.engine.step()

    def close(self) -> None:
        self.engine.close()
        self.executor.close()


def receive(output: StepOutput, answers: dict[int, Answer]) -> None:
    """Adds what a step says to the answers of its requests."""
    at = 0
    for key, num_tokens in zip(output.keys, output.num_tokens, strict=True):
        answers[key].token_ids += output.token_ids[at : at + num_tokens]
        answers[key].logprobs += [
            output.logprobs[i] for i in range(at, at + num_tokens) if i in output.logprobs
        ]
        at += num_tokens
    for part in output.prompt_logprobs:
        answers[part.key].prompt_logprobs += part.entries
    for start in output.starts:
        answers[start.key].cached_tokens = start.cached_tokens


def greedy(max_tokens: int, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **more)


ROUNDED = 0.2
"""Difference of log probabilities at most, of float32 on a GPU: it multiplies as TF32, with 10 bits
of a number's fraction, and weights of random checkpoints are large. A wrong model is off by
several."""


def check_rounded(
    model: Any, prompt: Sequence[int], token_ids: Sequence[int], scores: Sequence[float]
) -> None:
    """Greedy tokens and their log probabilities are those of transformers, but for what rounding
    changes: a token may be another one that is nearly as likely."""
    _, after = _scores(model, prompt, token_ids)
    chosen = after.gather(-1, torch.tensor(token_ids)[:, None]).squeeze(-1)
    assert (torch.tensor(scores) - chosen).abs().max().item() <= ROUNDED
    assert (after.max(-1).values - chosen).max().item() <= ROUNDED


def check_scores(model: Any, prompt: Sequence[int], answer: Answer, num_tokens: int) -> None:
    """An answer has `num_tokens` tokens. They are the greedy ones of transformers, which gives
    prompt and answer the same log probabilities, and the answer the same three likeliest tokens."""
    scores, after = _scores(model, prompt, answer.token_ids)
    assert answer.token_ids == after.argmax(-1).tolist()
    assert len(answer.token_ids) == num_tokens
    chosen = after.max(-1).values.tolist()
    assert [entry.logprob for entry in answer.logprobs] == pytest.approx(chosen, abs=1e-3)
    assert [entry.top_ids for entry in answer.logprobs] == after.topk(3).indices.tolist()
    scored = [scores[i, token].item() for i, token in enumerate(prompt[1:])]
    assert [entry.logprob for entry in answer.prompt_logprobs] == pytest.approx(scored, abs=1e-3)


def check_greedy(
    model: Any, prompt: Sequence[int], token_ids: Sequence[int], num_tokens: int
) -> None:
    """An answer has `num_tokens` tokens, each the likeliest of transformers behind those before it,
    as `reference_greedy` has them. One pass of the model shows it, not one a token."""
    _, after = _scores(model, prompt, token_ids)
    assert token_ids == after.argmax(-1).tolist()
    assert len(token_ids) == num_tokens


def _scores(
    model: Any, prompt: Sequence[int], token_ids: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log probabilities [num_tokens, vocab_size] behind each token of prompt and answer, and those
    of the answer's tokens alone."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *token_ids]])).logits[0]
    scores = logits.log_softmax(-1)
    return scores, scores[len(prompt) - 1 : -1]


def reference_greedy(model: Any, prompt: Sequence[int], max_tokens: int) -> list[int]:
    """What transformers answers."""
    with torch.no_grad():
        ids = model.generate(
            torch.tensor([list(prompt)]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    answer: list[int] = ids[0, len(prompt) :].tolist()
    return answer
